"""Where the memory of messages comes from: shared with the other ranks of the host, if that helps.

The shoal backend combines tensors that lie in shared memory without copying them. It pays where the
flat range itself is what travels: numbers as they are, summed by the backend's own all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.axes.compression import Trait
from shoal.runtime.flats import Allocate, zeros
from shoal.strategy import Strategy
from shoal.wire.shm import allocate


def allocator(strategy: Strategy, group: dist.ProcessGroup | None, *, workers: int) -> Allocate:
    """How to take memory for what a strategy sends.

    Args:
        strategy: what is sent, and how.
        group: who agrees; None is everybody.
        workers: how many they are; all must take memory in the same order.
    """
    traits = strategy.compression.traits
    as_it_is = Trait.LOSSLESS in traits and Trait.ELEMENTWISE in traits
    summed = strategy.coordination.via == "collective" and strategy.collectives.is_native
    if workers == 1 or not (as_it_is and summed):
        return zeros

    def shared(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return zeros(numel, dtype, device)
        return allocate(numel, dtype, group)

    return shared
