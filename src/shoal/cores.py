"""Count the cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores in this process's CPU affinity mask.

    On a system without such masks, return the number of all cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
