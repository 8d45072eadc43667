"""For each size, the number of leaders of a node whose slowest rank was fastest is kept."""

from __future__ import annotations

import pytest
from torch import Tensor

from shoal.wire.shm.multinode import TRIES, Leaders


class Rig:
    """Leaders with a clock that only ``use`` advances."""

    def __init__(self, *ways: int, others: tuple[float, ...] = (0.0, 0.0)) -> None:
        self.now, self.asked, self.others = 0.0, 0, others
        self.leaders = Leaders(ways, self._slowest, clock=lambda: self.now)

    def _slowest(self, seconds: Tensor) -> None:
        self.asked += 1
        for i, other in enumerate(self.others):
            seconds[i] = max(float(seconds[i]), other)

    def use(self, nbytes: int, *, taking: dict[int, float]) -> int:
        with self.leaders.leading(nbytes) as count:
            self.now += taking[count]
        return count


@pytest.mark.parametrize("best", [1, 4])
def test_ways_take_turns_and_then_the_faster_is_kept(best: int) -> None:
    rig = Rig(1, 4)
    taking = {1: 2.0, 4: 2.0, best: 1.0}
    counts = [rig.use(1000, taking=taking) for _ in range(2 * TRIES + 3)]
    assert counts == [1, 4] * TRIES + [best] * 3
    assert rig.asked == 1


def test_sizes_are_measured_apart() -> None:
    rig = Rig(1, 2)
    for _ in range(2 * TRIES):
        rig.use(100, taking={1: 1.0, 2: 2.0})
        rig.use(10**6, taking={1: 2.0, 2: 1.0})
    assert rig.use(110, taking={1: 0.0}) == 1
    assert rig.use(10**6 + 5, taking={2: 0.0}) == 2


def test_the_slowest_rank_of_all_decides() -> None:
    rig = Rig(1, 2, others=(0.0, 5.0))
    for _ in range(2 * TRIES):
        rig.use(100, taking={1: 2.0, 2: 1.0})
    assert rig.use(100, taking={1: 0.0}) == 1


def test_one_slow_try_does_not_rule_a_way_out() -> None:
    rig = Rig(1, 2)
    for i in range(2 * TRIES):
        rig.use(100, taking={1: 2.0, 2: 9.0 if i == 1 else 1.0})
    assert rig.use(100, taking={2: 0.0}) == 2


def test_a_single_way_is_never_measured() -> None:
    rig = Rig(1, 1)
    assert [rig.use(100, taking={1: 1.0}) for _ in range(20)] == [1] * 20
    assert rig.asked == 0
