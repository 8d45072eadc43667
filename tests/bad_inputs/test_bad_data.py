"""Datasets that are empty, broken or odd: refused by name, or read all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bad_input_forms import DATA, Made, X, Y, started
from torch.utils.data import DataLoader, IterableDataset

from shoal.errors import UsageError


def losses(dataset: Any, batch_size: Any = 4, **options: Any) -> list[float]:
    """Train over a dataset, in its own order."""
    run = started()
    feed = run.loader(dataset, batch_size, **{"shuffle": False, **options})
    return [run.step(batch).loss for batch in feed]


class Stream(IterableDataset[Any]):
    """No length, and as many samples as asked for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter((X[i % 8], Y[i % 8]) for i in range(self.length))


@pytest.mark.parametrize("empty", [[], Made(lambda i: DATA[i], 0), Stream(0), iter([])])
def test_an_empty_dataset_is_told_so(empty: Any) -> None:
    with pytest.raises(UsageError, match="dataset is empty"):
        losses(empty)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4", None])
def test_a_batch_size_is_a_whole_number_from_one_up(size: Any) -> None:
    with pytest.raises(UsageError, match=f"batch_size={size!r}: must be"):
        losses(DATA, size)


def test_a_batch_larger_than_the_dataset_is_warned_of_and_rounded_as_told() -> None:
    with pytest.warns(UserWarning, match="batch_size=99 exceeds the 8 samples.*one batch of 8"):
        assert len(losses(DATA, 99)) == 1


def test_a_batch_that_does_not_divide_the_dataset_leaves_a_smaller_one() -> None:
    assert len(losses(DATA, 3)) == 3


def test_a_stream_without_a_length_is_read_to_its_end() -> None:
    assert len(losses(Stream(9))) == 3
    assert len(losses(DATA[i] for i in range(8))) == 2
    with pytest.raises(TypeError, match="no len"):
        len(started().loader(Stream(9), 4))


@pytest.mark.parametrize(
    ("odd", "look"),
    [
        ((torch.zeros(3), Y[0]), r"\(a float32 tensor of shape \(3,\), a int64 tensor"),
        (None, "None"),
        ((None, Y[0]), r"\(None, a int64 tensor"),
        ((X[0], Y[0], Y[0]), r"\(a float32 .*, a int64 .*, a int64 "),
        ({"x": X[0]}, r"\{x: a float32 tensor"),
        ((list(range(99)), Y[0]), r"\(a list of 99, "),
    ],
)
@pytest.mark.parametrize("processes", [0, 1])
def test_a_sample_unlike_the_others_is_named_with_both_looks(
    odd: Any, look: str, processes: int
) -> None:
    if processes and odd is not None:
        pytest.skip("one is enough: a process costs a second")
    typical = r"\(a float32 tensor of shape \(4,\)"
    expected = rf"sample 5 is {look}.*but sample 4 is {typical}.*collating them raised"
    with pytest.raises(UsageError, match=expected):
        losses(Made(lambda i: odd if i == 5 else DATA[i]), processes=processes)


def test_an_odd_sample_of_a_stream_is_named_by_its_position() -> None:
    samples = [DATA[i] if i != 5 else None for i in range(8)]
    with pytest.raises(UsageError, match="sample 5 is None, but sample 4 is"):
        losses(iter(samples))


def test_samples_of_which_no_batch_can_be_made_are_told_what_they_are() -> None:
    with pytest.raises(UsageError, match=r"samples 0, 1, 2, 3 are each a object.*pass collate="):
        losses(Made(lambda i: object()))


def test_a_collate_of_ones_own_may_leave_samples_out_and_its_errors_name_the_batch() -> None:
    def without_none(samples: list[Any]) -> Any:
        present = [sample for sample in samples if sample is not None]
        return torch.stack([x for x, _ in present]), torch.stack([y for _, y in present])

    assert len(losses(Made(lambda i: None if i == 5 else DATA[i]), collate=without_none)) == 2
    with pytest.raises(UsageError, match=r"samples 0, 1, 2, 3 are each.*ZeroDivisionError"):
        losses(DATA, collate=lambda samples: 1 / 0)


def test_a_sample_that_raises_is_named() -> None:
    def faulty(index: int) -> Any:
        if index == 5:
            raise OSError("disk gone")
        return DATA[index]

    with pytest.raises(UsageError, match=r"sample 5 of Made cannot be read: OSError.*disk gone"):
        losses(Made(faulty))


@pytest.mark.gloo
def test_a_process_that_dies_while_it_reads_ends_the_loop() -> None:
    def deadly(index: int) -> Any:
        os._exit(3)

    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly"):
        losses(Made(deadly), processes=1)


@pytest.mark.parametrize("dataset", [None, 5, object()])
def test_what_is_no_dataset_is_refused(dataset: Any) -> None:
    with pytest.raises(UsageError, match=f"{type(dataset).__name__} is not a dataset"):
        losses(dataset)


def test_a_data_loader_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"pass its \.dataset"):
        losses(DataLoader(DATA))


def test_an_unknown_option_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown loader option 'suffle': did you mean shuffle"):
        losses(DATA, suffle=True)
