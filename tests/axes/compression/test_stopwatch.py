"""What a stopwatch measures, on a test's clock."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from clocks import Clock

from shoal.axes.compression import Value
from shoal.axes.compression.kit.stopwatch import Stopwatch
from shoal.flow import Ask, Mean


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
    one, two = watch.annotate([Value(torch.zeros(1), "a"), Value(torch.zeros(1), "b")])
    assert one.timing.took == two.timing.took == (3, 10)
    assert (one.timing.leads, two.timing.leads, one.timing.label) == (True, False, "")
    assert one.timing.bucket == two.timing.bucket != watch.annotate([one])[0].timing.bucket


def test_what_is_hidden_is_free_and_each_wait_counts_once() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.overlap()
    flows = {name: watch.timed(asking(clock), [name]) for name in "ab"}
    for flow in flows.values():
        next(flow)
        clock.seconds += 100  # backward goes on
    with watch.exposed_wait():
        for flow in flows.values():
            clock.seconds += 5  # on the link
            with pytest.raises(StopIteration):
                flow.send(None)
    clock.seconds += 100
    took = [watch.annotate([Value(torch.zeros(1), name)])[0].timing.took for name in "ab"]
    assert took == [(3, 5), (3, 5)]


def test_the_timing_of_a_bucket_passes_through_wrappers() -> None:
    (value,) = Stopwatch(logs=True).annotate([Value(torch.zeros(2), "a")])
    other = value.with_tensor(torch.ones(2))
    assert other.timing == value.timing
    assert (other.timing.label, other.name) == ("a", "a")
