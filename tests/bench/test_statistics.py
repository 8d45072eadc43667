"""What the statistics promise, on synthetic timings: with drift, outliers and an order effect.

The seeds are fixed, so every rate below is one number; the bounds are those that a fair
implementation passes on all but one in ten thousand seeds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.report import Threshold
from shoal.bench.statistics import (
    MAX_HALF_WIDTH,
    MIN_BLOCKS,
    ORDERS,
    Timings,
    compare,
    estimate,
    interval_of_median,
    paired_ratios,
    verdict,
)
from shoal.errors import BadArgument

Noise = Callable[[random.Random, int], float]
"""A factor on a block's time, by the position of the timing in the run."""


def _calm(rng: random.Random, position: int) -> float:
    return math.exp(rng.gauss(0, 0.02))


def _rough(rng: random.Random, position: int) -> float:
    """Drift of 30 % over the run, one block in ten disturbed, the first of a block slower."""
    drift = 1 + 0.3 * position / (3 * MIN_BLOCKS)
    burst = rng.uniform(1.2, 3) if rng.random() < 0.1 else 1
    first = 1.03 if position % 3 == 0 else 1
    return _calm(rng, position) * drift * burst * first


def _run(seed: int, ratio: float, noise: Noise, blocks: int = MIN_BLOCKS) -> Timings:
    """Timings of a subject ``ratio`` times as slow as its peer, the peer, and its twin."""
    rng, true = random.Random(seed), (ratio, 1.0, 1.0)
    seconds: list[list[float]] = [[], [], []]
    for block in range(blocks):
        for place, which in enumerate(ORDERS[block % 6]):
            seconds[which].append(true[which] * noise(rng, 3 * block + place))
    return Timings(*seconds)


def _verdict(seed: int, ratio: float, noise: Noise) -> bool | None:
    return compare(_run(seed, ratio, noise, blocks=4 * MIN_BLOCKS)).passes(
        Threshold.parse("<= 1.02")
    )


@pytest.mark.parametrize("noise", [_calm, _rough])
def test_the_intervals_hold_the_truth_95_times_in_100(noise: Noise) -> None:
    found = [compare(_run(seed, 1.05, noise)) for seed in range(1000)]
    # 0.95 - 3.7 standard errors; of 20 pairs of blocks the exact coverage is 0.959
    for truth, each in ((1.05, [f.ratio for f in found]), (1.0, [f.control for f in found])):
        hits = sum(e.interval.low <= truth <= e.interval.high for e in each)
        assert hits / len(each) >= 0.925


@pytest.mark.parametrize("noise", [_calm, _rough])
def test_who_just_meets_the_bar_fails_in_few_runs(noise: Noise) -> None:
    runs = 400
    alarms = sum(_verdict(seed, 1.02, noise) is False for seed in range(runs))
    assert alarms / runs <= 0.06  # stated: 2.5 %; 3.7 standard errors above


@pytest.mark.parametrize("noise", [_calm, _rough])
def test_who_keeps_the_bar_with_room_never_fails(noise: Noise) -> None:
    assert not any(_verdict(seed, 1.0, noise) is False for seed in range(200))


@pytest.mark.parametrize("noise", [_calm, _rough])
def test_who_is_a_tenth_too_slow_never_passes(noise: Noise) -> None:
    assert not any(_verdict(seed, 1.13, noise) for seed in range(200))


@given(st.floats(0.9, 1.1), st.floats(0.5, 2), st.floats(0.5, 2))
def test_drift_and_the_advantage_of_a_position_cancel_exactly(
    drift: float, first: float, last: float
) -> None:
    def steady(rng: random.Random, position: int) -> float:
        return drift**position * (first, 1.0, last)[position % 3]

    found = compare(_run(0, 1.05, steady))
    assert found.ratio.value == pytest.approx(1.05, rel=1e-9)
    assert found.control.value == pytest.approx(1, rel=1e-9)
    assert found.ratio.interval.half_width == pytest.approx(0, abs=1e-9)


def test_one_block_gone_wrong_moves_the_ratio_little() -> None:
    timings = _run(0, 1.0, _calm)
    before = compare(timings).ratio
    timings.subject[7] *= 1000  # type: ignore[index]
    assert before.interval.low <= compare(timings).ratio.value <= before.interval.high


def test_the_same_timings_give_the_same_interval() -> None:
    timings = _run(3, 1.0, _rough)
    assert compare(timings) == compare(Timings(*map(tuple, timings)))


blocks = st.lists(st.floats(1e-4, 1e3), min_size=MIN_BLOCKS, max_size=50)


@given(blocks, st.floats(0.1, 10))
def test_the_ratio_does_not_depend_on_the_unit_of_time(seconds: list[float], unit: float) -> None:
    here = Timings(seconds, seconds[::-1], seconds)
    there = Timings(*([unit * s for s in each] for each in here))
    assert compare(there).ratio.value == pytest.approx(compare(here).ratio.value)


@given(blocks)
def test_who_is_compared_with_itself_has_ratio_one_and_no_width(seconds: list[float]) -> None:
    found = compare(Timings(seconds, seconds, seconds))
    assert found.ratio == found.control
    assert found.ratio.value == 1
    assert found.ratio.interval.half_width == 0


@given(st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=50))
def test_the_interval_encloses_the_median(values: list[float]) -> None:
    found = estimate(values)
    assert found.interval.low <= found.value <= found.interval.high


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (40, 14), (100, 40)])
def test_the_order_statistics_are_those_of_the_table(count: int, rank: int) -> None:
    """Hahn & Meeker, table A.15 at 95 %; also any book on the sign test."""
    assert interval_of_median(range(1, count + 1)) == (rank, count + 1 - rank)


def test_every_order_comes_once_in_six_blocks() -> None:
    assert set(ORDERS) == set(permutations(range(3)))
    assert len(ORDERS) == 6


def test_neighbouring_blocks_swap_subject_and_peer_then_peer_and_twin() -> None:
    swaps = ({0: 1, 1: 0, 2: 2}, {0: 0, 1: 2, 2: 1})
    for block, here in enumerate(ORDERS):
        swap = swaps[block % 2]
        assert ORDERS[(block + 1) % 6] == tuple(swap[which] for which in here)


def test_an_odd_last_block_is_left_out() -> None:
    assert paired_ratios([2, 2, 9], [1, 1, 1]) == (2.0,)


@pytest.mark.parametrize(
    ("width", "number", "expected"),
    [
        (0.0, 1.02, True),
        (0.0, 1.021, False),
        (0.01, 1.03, True),
        (0.01, 1.031, False),
        (MAX_HALF_WIDTH, 1.05, True),
        (MAX_HALF_WIDTH + 1e-9, 1.0, None),
        (MAX_HALF_WIDTH + 1e-9, 9.0, None),
    ],
)
def test_the_control_widens_the_bar_until_it_is_too_wide(
    width: float, number: float, expected: bool | None
) -> None:
    assert verdict(Threshold.parse("<= 1.02"), number, half_width=width) is expected


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: compare(Timings([1.0] * 39, [1.0] * 39, [1.0] * 39)), "at least 40"),
        (lambda: compare(Timings([1.0] * 40, [1.0] * 40, [1.0] * 41)), "same number of blocks"),
        (lambda: compare(Timings([0.0] * 40, [0.0] * 40, [0.0] * 40)), "not positive"),
        (lambda: compare(Timings([math.nan] * 40, [1.0] * 40, [1.0] * 40)), "not positive"),
        (lambda: interval_of_median([1.0] * 5), "too few for 95%"),
        (lambda: interval_of_median([]), "too few"),
    ],
)
def test_too_little_to_conclude_from_is_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(BadArgument, match=named):
        call()
