"""Laws of the loader: one order for any number of workers, and the same tail from any position."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from shoal.samples import DataShard, Loader, LoaderOptions, count, make

QUIET = pytest.mark.filterwarnings("ignore:batch_size")


class Squares:
    """Map-style: sample i is (i, i * i)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index, index * index


class Stream(IterableDataset[tuple[int, int]]):
    """No length; the same every time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(i, i * i) for i in range(self.length)])


KINDS = {"map": Squares, "stream": Stream}
kinds = st.sampled_from(sorted(KINDS))


def workers(dataset: Any, batch_size: int, n: int, **options: Any) -> list[Loader]:
    return [make(dataset, batch_size, share=DataShard(i, n), **options) for i in range(n)]


def gathered(loaders: Iterable[Loader]) -> list[list[int]]:
    """The global batches, put together from the parts of all workers in step."""
    loaders = list(loaders)
    steps = []
    for batches in zip(*loaders, strict=True):
        for loader, (x, y) in zip(loaders, batches, strict=True):
            assert len(x) == len(y) == loader.mine == len(loader.ids)
            assert x.tolist() == list(loader.ids)
            assert (x * x).tolist() == y.tolist()
        held = [loader.mine for loader in loaders]
        assert max(held) - min(held) <= 1
        assert {loader.total for loader in loaders} == {sum(held)}
        steps.append([i for loader in loaders for i in loader.ids])
    return steps


@QUIET
@given(
    kind=kinds,
    length=st.integers(1, 40),
    n=st.integers(1, 5),
    extra=st.integers(0, 8),
    drop=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_any_number_of_workers_reads_the_same_batches_exactly_once(
    kind: str, length: int, n: int, extra: int, drop: bool, seed: int
) -> None:
    size = n + extra
    drop = drop and size <= length
    wanted = {"seed": seed, "epochs": 2, "drop_last": drop}
    dataset = KINDS[kind](length)
    together = gathered(workers(dataset, size, n, **wanted))
    assert together == gathered(workers(dataset, size, 1, **wanted))
    epochs = together[: len(together) // 2], together[len(together) // 2 :]
    for steps in epochs:
        flat = [i for step in steps for i in step]
        assert len(set(flat)) == len(flat)
        assert len(flat) == (length // size * size if drop else length)


@QUIET
@given(
    kind=kinds,
    length=st.integers(1, 30),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    extra=st.integers(0, 6),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_a_restart_anywhere_on_any_number_of_workers_reads_the_same_tail(
    kind: str, length: int, before: int, after: int, extra: int, data: st.DataObject
) -> None:
    size = max(before, after) + extra
    dataset = KINDS[kind](length)
    whole = gathered(workers(dataset, size, 1, epochs=3, seed=7))
    done = data.draw(st.integers(0, len(whole)))

    stopped = workers(dataset, size, before, epochs=3, seed=7)
    for loader in stopped:
        list(islice(loader, done))
    states = [json.loads(json.dumps(loader.state_dict())) for loader in stopped]
    assert all(state == states[0] for state in states)

    resumed = workers(dataset, size, after, epochs=3, seed=7)
    for loader in resumed:
        loader.load_state_dict(states[0])
    assert gathered(resumed) == whole[done:]


@QUIET
@given(kind=kinds, length=st.integers(1, 30), first=st.integers(1, 9), then=st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_another_batch_size_goes_on_in_the_same_order(
    kind: str, length: int, first: int, then: int
) -> None:
    dataset = KINDS[kind](length)
    order = [i for step in gathered(workers(dataset, first, 1)) for i in step]
    old, new = make(dataset, first), make(dataset, then)
    next(iter(old))
    new.load_state_dict(old.state_dict())
    assert [i for step in gathered([new]) for i in step] == order[first:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_without_samples_still_gets_a_batch(kind: str) -> None:
    loaders = workers(KINDS[kind](5), 4, 4, shuffle=False)
    assert gathered(loaders) == [[0, 1, 2, 3], [4]]
    spare = loaders[3]
    x, y = spare.last
    assert (spare.mine, spare.total, list(spare.ids)) == (0, 1, [])
    assert (x.shape, x.dtype, y.dtype) == ((0,), torch.int64, torch.int64)
    assert count(spare.last) == 0


def test_an_empty_part_keeps_the_shape_of_dicts_and_text() -> None:
    dataset = [{"x": torch.ones(3), "name": "a"}] * 3
    *_, batch = make(dataset, 2, share=DataShard(1, 2))
    assert batch["x"].shape == (0, 3)
    assert batch["name"] == []


def test_a_batch_that_cannot_be_cut_is_handed_over_whole_and_weighs_nothing() -> None:
    class Odd:
        def __init__(self, samples: list[int]) -> None:
            self.samples = samples

    loader = make(range(3), 2, share=DataShard(1, 2), collate=Odd)
    *_, batch = loader
    assert len(batch.samples) == 1
    assert (loader.mine, list(loader.ids)) == (0, [])


def test_the_batch_yielded_is_the_last_one() -> None:
    loader = make(Squares(6), 2)
    assert loader.last is None
    for batch in loader:
        assert loader.last is batch


def test_epochs_differ_unless_told_not_to_shuffle() -> None:
    first, second = gathered([make(Squares(20), 20, epochs=2)])
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    still = gathered([make(Squares(4), 2, epochs=2, shuffle=False)])
    assert still == [[0, 1], [2, 3]] * 2


def test_the_epoch_is_that_of_the_batch_in_hand() -> None:
    loader = make(Squares(5), 2, epochs=2)
    assert [loader.epoch for _ in loader] == [0, 0, 0, 1, 1, 1]
    assert loader.epoch == 2


@QUIET
def test_the_length_counts_global_batches_of_all_epochs() -> None:
    assert len(make(Squares(7), 3, epochs=2)) == 6
    assert len(make(Squares(7), 3, epochs=2, drop_last=True)) == 4
    assert len(make(Squares(7), 9, share=DataShard(1, 2))) == 1
    assert len(list(make(Stream(7), 3))) == 3
    with pytest.raises(TypeError, match="unknown length"):
        len(make(Stream(7), 3))


def test_a_loop_left_early_is_taken_up_by_the_next() -> None:
    loader, whole = make(Squares(9), 2), gathered([make(Squares(9), 2)])
    for _ in loader:
        break
    assert gathered([loader]) == whole[1:]


def test_reset_begins_again_in_the_same_order() -> None:
    loader = make(Squares(9), 2, epochs=2)
    first = gathered([loader])
    loader.reset()
    assert (loader.last, loader.mine, loader.total) == (None, 0, 0)
    assert gathered([loader]) == first


def test_a_restored_end_has_nothing_left() -> None:
    done = make(Squares(4), 2)
    list(done)
    again = make(Squares(4), 2)
    again.load_state_dict(done.state_dict())
    assert list(again) == []
    longer = make(Squares(4), 2, epochs=2)
    longer.load_state_dict(done.state_dict())
    assert len(list(longer)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_restoring_inside_a_loop_goes_on_from_there(kind: str) -> None:
    loader, seen = make(KINDS[kind](6), 2, shuffle=False), []
    kept: dict[str, int] = {}
    for batch in loader:
        seen.append(batch[0].tolist())
        if len(seen) == 1:
            kept = loader.state_dict()
        if len(seen) == 3:
            loader.load_state_dict(kept)
    assert seen == [[0, 1], [2, 3], [4, 5], [2, 3], [4, 5]]


def test_custom_collate_sees_the_samples_of_this_worker() -> None:
    loader = make(Squares(4), 4, share=DataShard(1, 2), collate=list, shuffle=False)
    assert list(loader) == [[(2, 4), (3, 9)]]


def test_options_are_a_value_too() -> None:
    loader = Loader(Squares(4), 2, options=LoaderOptions(shuffle=False))
    assert gathered([loader]) == [[0, 1], [2, 3]]


def test_anything_iterable_is_a_stream() -> None:
    class Lines:
        def __iter__(self) -> Iterator[int]:
            yield from (3, 1, 2)

    assert [batch.tolist() for batch in make(Lines(), 2, epochs=2)] == [[3, 1], [2]] * 2
    assert [batch.tolist() for batch in make(iter([5, 6, 7]), 2)] == [[5, 6], [7]]


def test_a_dataset_is_told_the_epoch() -> None:
    class Told(Squares):
        epochs: tuple[int, ...] = ()

        def set_epoch(self, epoch: int) -> None:
            self.epochs += (epoch,)

    told = Told(4)
    list(make(told, 2, epochs=3))
    assert told.epochs == (0, 1, 2)


def test_reading_leaves_the_random_generators_of_the_process_alone() -> None:
    for dataset in (Squares(6), Noisy(), NoisyStream()):
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        list(make(dataset, 2, augments=True))
        drawn = float(torch.rand(())), random.random(), float(numpy.random.rand())
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        assert drawn == (float(torch.rand(())), random.random(), float(numpy.random.rand()))


def noise() -> float:
    return float(torch.rand(())) + random.random() + float(numpy.random.rand())


class Noisy(Squares):
    """A map-style dataset that augments at random."""

    def __init__(self) -> None:
        super().__init__(7)

    def __getitem__(self, index: int) -> Any:
        return noise()


class NoisyStream(IterableDataset[float]):
    """A stream that draws at random."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(7):
            yield noise()


@pytest.mark.parametrize("dataset", [Noisy(), NoisyStream()], ids=["map", "stream"])
def test_augmentation_is_the_same_on_any_number_of_workers_and_after_a_restart(
    dataset: Any,
) -> None:
    def read(n: int, done: int = 0) -> list[float]:
        loaders = workers(dataset, 3, n, epochs=2, augments=True)
        for loader in loaders:
            loader.load_state_dict(loader.state_dict() | {"position": 3 * done})
        steps = zip(*loaders, strict=True)
        return [value for step in steps for batch in step for value in batch.tolist()]

    alone = read(1)
    assert len(set(alone)) == 14
    assert read(2) == read(3) == alone
    assert read(2, done=1) == alone[3:]
