"""How many ranks of a host speak with other hosts at once: one for all, or each for a slice.

One message has less overhead; several connections may fill a link, or a core, that one does not.
Which is faster depends on the machines, so it is measured. The first calls of each size (powers of
two) try the ways in turn; then all ranks agree on the one whose slowest rank was done first. Either
way numbers are combined in the order of hosts, so results do not depend on the choice.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

log = logging.getLogger(__name__)

TRIES = 4  # of each way and size; the best of them counts, for the first pays for memory too


class Speakers:
    """The number of speakers a host for each size of message.

    Args:
        ways: numbers to choose from.
        slowest: replaces seconds by the most that any rank of the group has; a collective.
        clock: seconds.
    """

    def __init__(
        self,
        ways: Sequence[int],
        slowest: Callable[[Tensor], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ways, self._slowest, self._clock = tuple(dict.fromkeys(ways)), slowest, clock
        self._seconds: dict[int, list[float]] = defaultdict(list)
        self.chosen: dict[int, int] = {}  # by the number of bits of the size in bytes

    @contextmanager
    def speaking(self, nbytes: int) -> Iterator[int]:
        """How many ranks of each host shall speak; what is done inside is timed if need be."""
        size = nbytes.bit_length()
        if len(self._ways) == 1 or size in self.chosen:
            yield self.chosen.get(size, self._ways[0])
            return
        seconds = self._seconds[size]
        begin = self._clock()
        yield self._ways[len(seconds) % len(self._ways)]
        seconds.append(self._clock() - begin)
        if len(seconds) == TRIES * len(self._ways):
            self._choose(size)

    def _choose(self, size: int) -> None:
        seconds = self._seconds.pop(size)
        best = torch.tensor([min(seconds[i :: len(self._ways)]) for i in range(len(self._ways))])
        self._slowest(best)
        self.chosen[size] = self._ways[int(best.argmin())]
        told = ", ".join(
            f"{way}: {taken * 1e3:.2f} ms"
            for way, taken in zip(self._ways, best.tolist(), strict=True)
        )
        log.debug("below %d bytes, speakers a host: %d (%s)", 1 << size, self.chosen[size], told)
