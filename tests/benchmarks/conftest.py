"""Make the package ``benchmarks`` of this checkout importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
