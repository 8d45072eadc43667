"""Facts of the members; what all of them keep is in laws/."""

from __future__ import annotations

import math

import pytest

from shoal.axes.synchrony import Synchrony, asp, bsp, local, ssp
from shoal.errors import BadArgument


@pytest.mark.parametrize(
    ("synchrony", "period", "staleness"),
    [(bsp(), 1, 0), (ssp(0), 1, 0), (ssp(3), 1, 3), (asp(), 1, math.inf), (local(8), 8, 0)],
    ids=repr,
)
def test_period_and_staleness(synchrony: Synchrony, period: int, staleness: float) -> None:
    assert (synchrony.period, synchrony.staleness) == (period, staleness)


def test_who_waits_and_who_is_free() -> None:
    assert [s.waits for s in (bsp(), ssp(0), ssp(1), asp(), local(4))] == [1, 1, 0, 0, 1]
    assert [s.free for s in (bsp(), ssp(0), ssp(1), asp(), local(4))] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1", None, math.inf, 10**400])
def test_a_bound_is_a_whole_number_that_a_float_holds(wrong: object) -> None:
    with pytest.raises(BadArgument, match="ssp"):
        ssp(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "1", None])
def test_local_steps_are_a_whole_number_from_one_up(wrong: object) -> None:
    with pytest.raises(BadArgument, match="local"):
        local(wrong)  # type: ignore[arg-type]
