"""The suite of collectives: what is compared with what, and that it runs (nothing is timed)."""

from __future__ import annotations

import pytest

from shoal import bench
from shoal.bench import collectives
from shoal.bench.collective_calls import COLLECTIVES, IN_PLACE
from shoal.bench.collectives import (
    MB,
    SIZES,
    Point,
    Times,
    copy_bar,
    gloo_bar,
    measure,
    parse_sizes,
    spaced,
    spell,
    timed,
)
from shoal.errors import BadArgument


def times(ours: float, gloo: float, copy: float) -> Times:
    return Times([ours] * 12, [gloo] * 12, [copy] * 12)


def test_the_suite_is_listed() -> None:
    assert bench.find("collectives") is collectives.SUITE


def test_the_bars_are_those_of_the_issue() -> None:
    assert parse_sizes("4KB:64MB") == SIZES
    assert [spell(n) for n in SIZES[::7]] == ["4 KB", "64 MB"]
    assert gloo_bar(Point("all_reduce", 64 << 10, 2)) == "<= 0.3333"
    assert gloo_bar(Point(IN_PLACE.name, 16 * MB, 4)) == "<= 0.2"
    assert gloo_bar(Point("broadcast", 16 * MB, 4)) == "<= 1"
    assert copy_bar(Point(IN_PLACE.name, 64 * MB, 2)) == "<= 2.5"
    assert copy_bar(Point(IN_PLACE.name, 64 * MB, 4)) == "<= 3.5"
    assert copy_bar(Point("all_reduce", 64 * MB, 2)) is None


def test_a_row_tells_time_bandwidth_and_verdict() -> None:
    point = Point("all_reduce", MB, 2)
    row, wide = timed(point, times(1e-3, 5e-3, 5e-4)), spaced(point, times(1e-3, 5e-3, 5e-4))
    assert (row.value, row.unit, row.against) == (1000, "us", "gloo")
    assert row.ratio == pytest.approx(0.2)
    assert row.holds
    assert wide.value == pytest.approx(MB / 1e-3 / 1e9)  # each rank sends half and takes half
    assert wide.ratio == pytest.approx(2)
    assert wide.holds is None
    assert not timed(point, times(1.0, 2.0, 1.0)).holds


@pytest.mark.parametrize("text", ["", "4", "1MB:4KB", "4KB:1MB:2MB", "big", "1B"])
def test_sizes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="--sizes"):
        parse_sizes(text)


@pytest.mark.gloo
def test_every_collective_is_measured() -> None:
    found = measure(2, 4096, 2)
    assert [point.name for point, _ in found] == [c.name for c in COLLECTIVES]
    for _, taken in found:
        assert all(len(each) == 2 for each in (taken.shoal, taken.gloo, taken.copy))
