"""The loader with DataLoader's worker processes: the same order, position and errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shoal.errors import UsageError
from shoal.samples import DataShard, make

pytestmark = pytest.mark.gloo


class Rows:
    """Map-style; a sample tells its index, the process that read it and a random number."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        return index, os.getpid(), float(torch.rand(()))


class Sharded(IterableDataset[int]):
    """A stream that shards itself among DataLoader's processes."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        step = 1 if info is None else info.num_workers
        yield from range(0 if info is None else info.id, 7, step)


class Broken(Rows):
    def __getitem__(self, index: int) -> tuple[int, int, float]:
        raise RuntimeError(f"no row here: {index}")


def columns(loader: Any, column: int = 0) -> list[list[float]]:
    return [batch[column].tolist() for batch in loader]


def test_processes_change_neither_order_nor_parts() -> None:
    for share in (DataShard(0, 2), DataShard(1, 2)):
        here = make(Rows(), 4, share=share, epochs=2)
        there = make(Rows(), 4, share=share, epochs=2, processes=1)
        assert columns(there) == columns(here)


def test_samples_are_read_elsewhere_and_the_state_counts_what_was_consumed() -> None:
    loader = make(Rows(), 2, processes=1, prefetch=4)
    for batch in islice(loader, 2):
        assert os.getpid() not in batch[1].tolist()
    assert loader.state_dict()["position"] == 4
    rest = make(Rows(), 2)
    rest.load_state_dict(loader.state_dict())
    assert columns(loader) == columns(rest)


def test_processes_are_seeded_by_the_seed_alone() -> None:
    first, second, other = (
        columns(make(Rows(), 4, processes=1, seed=seed, shuffle=False), 2) for seed in (3, 3, 4)
    )
    assert first == second != other


def test_augmentation_does_not_depend_on_processes() -> None:
    here, there = (
        columns(make(Rows(), 4, augments=True, processes=processes), 2) for processes in (0, 2)
    )
    assert here == there


@pytest.mark.parametrize("processes", [0, 1])
def test_a_stream_that_shards_itself_is_read_whole(processes: int) -> None:
    parts = [
        [batch.tolist() for batch in make(Sharded(), 4, share=DataShard(i, 2), processes=processes)]
        for i in range(2)
    ]
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_a_stream_is_resumed_in_its_process() -> None:
    loader = make(Sharded(), 3, processes=1)
    loader.load_state_dict(loader.state_dict() | {"position": 4})
    assert [batch.tolist() for batch in loader] == [[4, 5, 6]]


def test_a_sample_that_raises_in_a_process_names_itself_and_its_cause() -> None:
    with pytest.raises(UsageError, match=r"sample 0 of Broken(.|\n)*no row here: 0") as caught:
        list(make(Broken(), 2, shuffle=False, processes=1))
    assert "in __getitem__" in str(caught.value)
