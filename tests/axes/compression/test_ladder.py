"""How ``tuned`` decides, and what it decides on: pure rules, and a stopwatch on a test's clock."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from clocks import Clock

from shoal.axes.compression import Value
from shoal.axes.compression.kit.ladder import PATIENCE, Ladder
from shoal.axes.compression.kit.stopwatch import Known, Stopwatch
from shoal.flow import Ask, Mean

EVERY = 6


def ladder(*, most: float = 1.0) -> Ladder:
    return Ladder(rungs=3, every=EVERY, most=most)


@pytest.mark.parametrize(
    ("seconds", "current", "expected"),
    [
        ((3, 2, 1), 0, 2),  # the fastest
        ((1, 0.95, 0.99), 0, 0),  # not clearly faster than what runs
        ((1, 0.95, 0.99), 2, 1),  # a gentler one that is as fast as what runs
        ((3, 1.05, 1), 0, 1),  # a gentler one of those that are clearly faster
        ((0, 0, 0), 2, 0),  # nobody measured
    ],
)
def test_the_fastest_is_taken_and_of_like_ones_the_gentler(
    seconds: tuple[float, ...], current: int, expected: int
) -> None:
    assert ladder().pick([Known(s / 2, s / 2, 0) for s in seconds], current) == expected


def test_a_residual_over_the_bound_rules_out() -> None:
    known = [Known(9, 9, 0), Known(2, 2, 0.5), Known(1, 1, 1.5)]
    assert ladder().pick(known, 2) == 1
    assert ladder(most=2.0).pick(known, 0) == 2
    assert ladder().pick([k._replace(residual=k.residual + 2) for k in known], 2) == 0


def test_one_odd_look_is_none_two_are_another_link() -> None:
    rungs, known = ladder(), [Known(1, 4, 0)] * 3
    note = rungs.start()._replace(trying=False, age=EVERY - 1)
    note = rungs.judged(note, known)
    assert note.usual == 4
    odd = [Known(1, 9, 0)] * 3
    note = rungs.judged(rungs.judged(note, odd), known)
    assert not note.odd
    assert not rungs.judged(note, odd).trying
    assert rungs.judged(rungs.judged(note, odd), odd).trying


def test_after_many_quiet_looks_all_are_tried_again_and_later_each_time() -> None:
    rungs, known = ladder(), [Known(1, 4, 0.5)] * 3
    note = rungs.start()._replace(trying=False, usual=4.0, residuals=(0.0, 0.5, 0.5))
    for patience in (PATIENCE, 2 * PATIENCE, 4 * PATIENCE):
        for _ in range(patience - 1):
            note = rungs.judged(note, known)
            assert not note.trying
        note = rungs.judged(note, known)
        assert note.trying
        note = rungs.judged(note, known)
    assert note.residuals == (0.0, 0.0625, 0.0625), "half forgiven each time"


def asking(clock: Clock) -> Generator[Ask, Any, str]:
    clock.seconds += 1
    yield Mean(torch.zeros(1))
    clock.seconds += 2
    return "end"


def test_a_stopwatch_tells_running_from_waiting() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    flow = watch.timed(asking(clock), ["a", "b"])
    next(flow)
    clock.seconds += 10
    with pytest.raises(StopIteration, match="end"):
        flow.send(None)
    one, two = watch.told([Value(torch.zeros(1), "a"), Value(torch.zeros(1), "b")])
    assert one.told.took == two.told.took == (3, 10)
    assert (one.told.leads, two.told.leads, one.told.label) == (True, False, "")
    assert one.told.bucket == two.told.bucket != watch.told([one])[0].told.bucket


def test_what_is_hidden_is_free_and_each_wait_counts_once() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.overlap()
    flows = {name: watch.timed(asking(clock), [name]) for name in "ab"}
    for flow in flows.values():
        next(flow)
        clock.seconds += 100  # backward goes on
    with watch.standing():
        for flow in flows.values():
            clock.seconds += 5  # on the link
            with pytest.raises(StopIteration):
                flow.send(None)
    clock.seconds += 100
    took = [watch.told([Value(torch.zeros(1), name)])[0].told.took for name in "ab"]
    assert took == [(3, 5), (3, 5)]


def test_what_is_told_of_a_bucket_passes_through_wrappers() -> None:
    (value,) = Stopwatch(speaks=True).told([Value(torch.zeros(2), "a")])
    other = value.with_tensor(torch.ones(2))
    assert other.told == value.told
    assert (other.told.label, other.name) == ("a", "a")
