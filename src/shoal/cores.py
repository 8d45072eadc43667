"""How many cores there are for this process."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Those it may run on; where the system does not tell, all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
