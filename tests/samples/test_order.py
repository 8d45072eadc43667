"""Laws of the global order: exact union, fair parts, no dependence on the number of workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadArgument
from shoal.samples.order import (
    DataShard,
    SampleRange,
    batch_count,
    batches,
    mix,
    order,
    part,
)

lengths = st.integers(1, 60)
sizes = st.integers(1, 20)
counts = st.integers(1, 9)


@given(start=st.integers(0, 50), size=st.integers(0, 50), count=counts)
@settings(deadline=None)
def test_parts_follow_each_other_and_cover_the_batch(start: int, size: int, count: int) -> None:
    parts = [part(SampleRange(start, start + size), DataShard(i, count)) for i in range(count)]
    covered = [position for piece in parts for position in range(*piece)]
    assert covered == list(range(start, start + size))


@given(size=st.integers(0, 50), count=counts)
@settings(deadline=None)
def test_sizes_of_parts_differ_by_at_most_one(size: int, count: int) -> None:
    held = [part(SampleRange(0, size), DataShard(i, count)).size for i in range(count)]
    assert max(held) - min(held) <= 1
    assert held == sorted(held, reverse=True)


@given(length=lengths, size=sizes, start=st.integers(0, 60), drop=st.booleans())
@settings(deadline=None)
def test_batches_are_full_but_for_the_last(length: int, size: int, start: int, drop: bool) -> None:
    spans = list(batches(SampleRange(start, length), size, drop_last=drop))
    assert all(span.size == size for span in spans[: None if drop else -1])
    covered = [position for span in spans for position in range(*span)]
    tail = list(range(start, length))
    assert covered == (tail[: len(tail) // size * size] if drop else tail)
    if start == 0:
        assert len(spans) == batch_count(length, size, drop_last=drop)


@given(length=lengths, seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 1000))
@settings(deadline=None)
def test_an_order_holds_every_sample_once(length: int, seed: int, epoch: int) -> None:
    once = order(length, seed=seed, epoch=epoch)
    again = order(length, seed=seed, epoch=epoch)
    assert isinstance(once, torch.Tensor)
    assert isinstance(again, torch.Tensor)
    assert sorted(once.tolist()) == list(range(length))
    assert torch.equal(once, again)


def test_orders_of_other_epochs_and_seeds_differ() -> None:
    seen = {
        tuple(int(i) for i in order(50, seed=seed, epoch=epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(seen) == 25


def test_without_shuffle_the_order_is_that_of_the_dataset() -> None:
    assert order(5, seed=3, epoch=2, shuffle=False) == range(5)


def test_an_order_leaves_the_random_generator_of_the_process_alone() -> None:
    before = torch.get_rng_state()
    order(10, seed=0, epoch=0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_mixed_seed_fits_a_torch_generator() -> None:
    assert all(0 <= mix(key, -key) < 2**63 for key in range(100))
    assert len({mix(a, b) for a in range(30) for b in range(30)}) == 900


@pytest.mark.parametrize(("index", "count"), [(1, 1), (-1, 2), (0, 0), (3, 2)])
def test_a_share_outside_its_workers_is_refused(index: int, count: int) -> None:
    with pytest.raises(BadArgument, match=f"index={index}, count={count}"):
        DataShard(index, count)
