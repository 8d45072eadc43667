"""Laws of batches: any shape can be counted, moved and split, or it says why not."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from shoal.errors import BadArgument, UsageError
from shoal.samples import count, move, split
from shoal.samples.batch import cut
from shoal.samples.order import SampleRange


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str = "record"


class Rows:
    """A batch of the user's own, counted by __len__, moved by to, split by slices."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.device = "cpu"

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, where: slice) -> Rows:
        return Rows(self.x[where])

    def to(self, device: torch.device) -> Rows:
        moved = Rows(self.x.to(device))
        moved.device = device.type
        return moved


@dataclass
class Graphs:
    """Like PyTorch Geometric's batch: more nodes than graphs."""

    x: Tensor
    num_graphs: int


def column(rows: int) -> Tensor:
    return torch.arange(float(rows)).unsqueeze(1).repeat(1, 3)


def packed(*lengths: int, ordered: bool = True) -> PackedSequence:
    return pack_sequence([torch.full((n, 2), float(n)) for n in lengths], enforce_sorted=ordered)


BATCHES: dict[str, Any] = {
    "tensor": column(5),
    "tuple": (column(5), torch.zeros(5)),
    "list": [column(5), torch.zeros(5)],
    "dict": {"x": column(5), "y": torch.zeros(5)},
    "ordered": OrderedDict(x=column(5)),
    "user dict": UserDict(x=column(5)),
    "frozen mapping": MappingProxyType({"x": column(5)}),
    "named tuple": Pair(column(5), torch.zeros(5)),
    "dataclass": Record(column(5)),
    "nested": {"in": (column(5), [torch.zeros(5)]), "names": list("abcde"), "scale": 2.0},
    "text": list("abcde"),
    "column of text": {"text": list("abcde")},
    "own": Rows(column(5)),
    "packed": packed(5, 4, 3, 2, 1),
    "unordered": packed(1, 3, 2, 5, 4, ordered=False),
    "none first": (None, column(5)),
    "numpy": column(5).numpy(),
}
every = pytest.mark.parametrize("name", BATCHES)


@every
def test_a_batch_of_five_counts_five(name: str) -> None:
    assert count(BATCHES[name]) == 5


@every
def test_parts_of_a_split_are_fair_and_add_up(name: str) -> None:
    parts = split(BATCHES[name], 3)
    assert [count(piece) for piece in parts] == [2, 2, 1]
    assert all(type(piece) is type(BATCHES[name]) for piece in parts)


@every
def test_a_batch_on_its_device_stays_what_it_is(name: str) -> None:
    batch = move(BATCHES[name], "cpu")
    assert type(batch) is type(BATCHES[name])
    assert count(batch) == 5


@given(rows=st.integers(1, 30), parts=st.integers(1, 12))
@settings(deadline=None)
def test_a_split_loses_and_repeats_nothing(rows: int, parts: int) -> None:
    pieces = split({"x": column(rows), "y": (torch.arange(rows), "kept")}, parts)
    assert len(pieces) == min(rows, parts)
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), column(rows))
    assert torch.cat([piece["y"][0] for piece in pieces]).tolist() == list(range(rows))
    assert all(piece["y"][1] == "kept" for piece in pieces)


def test_graphs_are_counted_by_num_graphs_and_not_by_nodes() -> None:
    assert count(Graphs(torch.zeros(17, 2), num_graphs=4)) == 4
    assert count((Graphs(torch.zeros(17, 2), num_graphs=4), torch.zeros(9))) == 4


def test_move_reaches_every_tensor() -> None:
    moved = move({"a": [Pair(column(2), column(2))], "b": Record(column(2)), "c": "text"}, "meta")
    leaves = [moved["a"][0].x, moved["a"][0].y, moved["b"].x]
    assert {leaf.device.type for leaf in leaves} == {"meta"}
    assert moved["c"] == "text"
    assert move(Rows(column(2)), "meta").device == "meta"
    assert move(packed(2, 1), "meta").data.device.type == "meta"
    assert move(Graphs(column(2), 1), "meta").x.device.type == "meta"


def test_move_of_nothing_returns_the_same_object() -> None:
    batch = Record(column(2))
    assert move(batch, "cpu") is batch


def test_a_split_of_packed_sequences_keeps_each_sequence() -> None:
    for ordered, lengths in ((True, (4, 3, 1)), (False, (1, 4, 3))):
        pieces = split(packed(*lengths, ordered=ordered), 2)
        unpacked = [pad_packed_sequence(piece, batch_first=True) for piece in pieces]
        assert [n for _, held in unpacked for n in held.tolist()] == list(lengths)
        firsts = [row for padded, _ in unpacked for row in padded[:, 0, 0].tolist()]
        assert firsts == [float(n) for n in lengths]


def test_a_list_inside_a_batch_as_long_as_it_holds_one_entry_a_sample() -> None:
    images = [torch.zeros(3, 4, 4 + i) for i in range(5)]
    pieces = split((column(5), images), 2)
    assert [len(piece[1]) for piece in pieces] == [3, 2]
    assert pieces[1][1][0] is images[3]


def test_two_columns_of_two_samples_are_columns() -> None:
    first, second = split([column(2), torch.tensor([7, 8])], 2)
    assert (first[1].tolist(), second[1].tolist()) == ([7], [8])
    nested = split([[column(2), column(2)], torch.tensor([7, 8])], 2)
    assert [len(piece[0]) for piece in nested] == [2, 2]
    assert nested[1][0][1].tolist() == [[1.0, 1.0, 1.0]]


def test_tensors_of_no_dimension_are_repeated() -> None:
    pieces = split((column(2), torch.tensor(3.0)), 2)
    assert [float(piece[1]) for piece in pieces] == [3.0, 3.0]


def test_rows_say_what_count_cannot_know() -> None:
    images, labels = [torch.zeros(3, i, i) for i in range(1, 5)], list("abcd")
    pieces = split((images, labels), 2, rows=4)
    assert [len(piece[0]) for piece in pieces] == [2, 2]


def test_a_batch_of_none_or_one_is_one_micro_batch() -> None:
    for rows in (0, 1):
        batch = column(rows)
        assert split(batch, 4)[0] is batch


def test_one_part_is_the_batch_itself_whatever_it_is() -> None:
    batch = object()
    assert split(batch, 1) == [batch]


@pytest.mark.parametrize("batch", [object(), 3, "text", None, {}, {"a": 1}, [["a"], ["b"]]])
def test_a_batch_that_cannot_be_counted_says_how_to_say_it(batch: Any) -> None:
    with pytest.raises(UsageError, match="num_samples"):
        count(batch)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((column(4), torch.zeros(7, 2)), r"shape \(7, 2\) in a batch of 4"),
        (Graphs(torch.zeros(9, 2), num_graphs=4), "Graphs"),
        ((column(4), object()), "object"),
        ((column(4), packed(2, 1)), "PackedSequence of 2"),
        ({"a": {1, 2, 3, 4}, "x": column(4)}, "set"),
    ],
)
def test_a_batch_that_cannot_be_split_names_what_stands_in_the_way(batch: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        split(batch, 2)


class Stubborn(Rows):
    def __getitem__(self, where: slice) -> Rows:
        raise TypeError("no slices")


def test_an_object_that_refuses_slices_is_named() -> None:
    with pytest.raises(UsageError, match=r"Stubborn.*no slices"):
        split(Stubborn(column(4)), 2)


def test_a_batch_with_nothing_to_cut_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing in it has 3"):
        cut({"a": [1, 2]}, 3, SampleRange(0, 1))


@pytest.mark.parametrize("parts", [0, -1, 1.5, True])
def test_parts_must_be_a_positive_int(parts: Any) -> None:
    with pytest.raises(BadArgument, match="parts="):
        split(column(4), parts)
