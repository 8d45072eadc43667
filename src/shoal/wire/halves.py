"""An all-reduce in two halves, in place: sums are scattered now, and gathered when they are needed.

Both run round a ring by point-to-point messages, so that a tensor of any length will do and no
copy is made. Blocking: whoever wants overlap calls them from a communication thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from shoal.wire.route import PlainCopy, legs, run_legs


class Halves:
    """The two halves of a ring's rounds, for one rank of a group.

    Args:
        group: None for all ranks.
        rounds: of an all-reduce whose first half scatters sums, and whose second gathers them.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rounds: Sequence[Sequence[PlainCopy]]
    ) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._first = legs(rounds[: len(rounds) // 2], rank)
        self._second = legs(rounds[len(rounds) // 2 :], rank)

    def scatter(self, tensor: Tensor) -> Tensor:
        """Each rank ends with the sum of one chunk; the rest is half done."""
        run_legs(tensor, self._first, chunks=self._size, group=self._group)
        return tensor

    def spread(self, tensor: Tensor) -> Tensor:
        """All ranks end with all sums."""
        run_legs(tensor, self._second, chunks=self._size, group=self._group)
        return tensor
