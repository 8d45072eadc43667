"""What the loader refuses, and what it says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from shoal.errors import BadArgument, CheckpointMismatch, UnknownName, UsageError
from shoal.samples import DataShard, LoaderOptions, make


class Faulty(Dataset[int]):
    """Sample 3 cannot be read."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise KeyError("no such file")
        return index


class Growing(Dataset[int]):
    """Longer each time it has been read to the end."""

    length = 4

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Empty(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="dataset is empty"):
        make([], 2)
    with pytest.raises(UsageError, match="dataset is empty: the stream yielded no samples"):
        list(make(Empty(), 2))
    with pytest.raises(UsageError, match="fewer than 9 samples, all dropped"):
        list(make(iter(range(3)), 9, drop_last=True))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4", None])
def test_a_batch_size_that_is_no_positive_int_is_refused(size: Any) -> None:
    with pytest.raises(BadArgument, match=f"batch_size={size!r}"):
        make(range(9), size)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", -1),
        ("epochs", 1.5),
        ("processes", -1),
        ("prefetch", 0),
        ("seed", 0.5),
        ("seed", False),
        ("collate", 3),
    ],
)
def test_an_option_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadArgument, match=f"{name}={value!r}"):
        LoaderOptions(**{name: value})


def test_an_unknown_option_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean shuffle"):
        make(range(4), 2, suffle=True)


def test_fewer_samples_a_batch_than_workers_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"batch_size=3 .* 4 workers.*raise batch_size or use fewer"
    ):
        make(range(9), 3, share=DataShard(0, 4))


def test_a_batch_larger_than_the_dataset_warns_once_and_says_what_happens() -> None:
    with pytest.warns(UserWarning, match="one batch of 3") as caught:
        sizes = [len(batch) for batch in make(range(3), 8, epochs=2)]
    assert sizes == [3, 3]
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(range(3), 8, share=DataShard(1, 2))  # worker 0 has said it


def test_dropping_the_only_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="drop_last would drop all"):
        make(range(3), 8, drop_last=True)


@pytest.mark.parametrize("dataset", [None, 5, object(), Dataset()])
def test_what_is_no_dataset_is_refused(dataset: Any) -> None:
    with pytest.raises(UsageError, match=r"is not a dataset"):
        make(dataset, 2)


def test_a_data_loader_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"pass its \.dataset"):
        make(DataLoader(Growing()), 2)


def test_a_sample_that_raises_is_named_and_its_exception_is_the_cause() -> None:
    with pytest.raises(UsageError, match=r"sample 3 of Faulty.*no such file") as caught:
        list(make(Faulty(), 2))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_sample_that_raises_is_named_also_when_read_together() -> None:
    with pytest.raises(UsageError, match=r"sample 1 of Subset.*no such file"):
        list(make(Subset(Faulty(), [0, 3, 1]), 3))


def test_samples_that_cannot_be_read_together_are_named() -> None:
    class Together(Growing):
        def __getitems__(self, indices: list[int]) -> list[int]:
            raise OSError("one at a time")

    with pytest.raises(UsageError, match=r"__getitems__\(\[0, 1\]\) raised .*one at a time"):
        list(make(Together(), 2, shuffle=False))


def test_a_stream_that_raises_names_the_position() -> None:
    def lines() -> Iterator[int]:
        yield from range(5)
        raise OSError("disk gone")

    with pytest.raises(UsageError, match=r"sample 5 of the stream.*disk gone") as caught:
        list(make(lines(), 2))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_dataset_that_changes_its_length_between_epochs_is_refused() -> None:
    growing = Growing()
    loader = iter(make(growing, 2, epochs=2))
    next(loader), next(loader)
    growing.length = 6
    with pytest.raises(UsageError, match="had 4 samples and has 6 in epoch 1"):
        next(loader)


def test_two_processes_for_a_stream_are_refused() -> None:
    with pytest.raises(UsageError, match=r"processes=2.*processes=1 or 0"):
        make(Empty(), 2, processes=2)


def test_an_iterator_can_be_read_only_once() -> None:
    with pytest.raises(UsageError, match="epochs=2"):
        make(iter(range(4)), 2, epochs=2)
    loader = make(iter(range(4)), 2)
    next(iter(loader))
    with pytest.raises(UsageError, match="only once, and some of it has been"):
        next(iter(loader))


def test_a_second_run_over_a_finished_loader_is_refused() -> None:
    loader = make(range(4), 2)
    list(loader)
    with pytest.raises(UsageError, match=r"all 1 epochs.*reset\(\)"):
        next(iter(loader))


def test_two_loops_at_once_are_refused() -> None:
    loader = make(range(6), 2)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(UsageError, match="another loop"):
        next(first)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 4}, "seed 4, but has 0"),
        ({"length": 8}, "length 8, but has 9"),
        ({"shuffle": 0}, "shuffle 0, but has 1"),
        ({"position": 10}, "position 10 of 9"),
        ({"position": -1}, "position -1"),
        ({"epoch": -1}, "epoch -1"),
        ({"epoch": None}, "no int for epoch"),
        ({"seed": "0"}, "no int for seed"),
    ],
)
def test_a_state_of_other_data_is_refused_with_both_values(
    change: dict[str, Any], said: str
) -> None:
    loader = make(range(9), 3)
    before = loader.state_dict()
    with pytest.raises(CheckpointMismatch, match=said):
        loader.load_state_dict(before | change)
    assert loader.state_dict() == before


def test_a_stream_shorter_than_the_saved_position_is_refused() -> None:
    loader = make(iter(range(5)), 2)
    loader.load_state_dict(loader.state_dict() | {"position": 8})
    with pytest.raises(CheckpointMismatch, match=r"ended after 5 samples, before the saved .* 8"):
        list(loader)


def test_pin_memory_is_harmless_without_an_accelerator() -> None:
    loader = make(torch.arange(4), 2, shuffle=False, pin_memory=True)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
