"""A root with two small checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_forms import small

from shoal.checkpoint import save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save(tmp_path / "run", small(step), step=step)
    return tmp_path / "run"
