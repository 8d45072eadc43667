"""What workers of these tests begin with."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from shoal.wire.shm import register


def enter(seconds: float = 60) -> tuple[int, int]:
    """Make the default group on the shoal backend; return rank and size."""
    register()
    dist.init_process_group("shoal", timeout=timedelta(seconds=seconds))
    return dist.get_rank(), dist.get_world_size()


def gloo(seconds: float = 60) -> dist.ProcessGroup:
    """A group of all ranks on gloo, to compare with."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
