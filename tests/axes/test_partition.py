"""Degrees multiply; the laws of every partition, on products nobody thought of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.axes.partition import Partition, data, pipe, shard, tensor
from shoal.errors import BadArgument, UsageError
from shoal.testing.contracts import check

partitions = st.builds(Partition, st.none() | st.integers(1, 9), *[st.integers(1, 9)] * 3)


@given(partitions)
def test_every_product_keeps_the_laws(partition: Partition) -> None:
    check(partition)


@given(partitions, partitions)
def test_products_commute_and_their_ranks_multiply(one: Partition, other: Partition) -> None:
    if one.data is not None and other.data is not None:
        with pytest.raises(UsageError, match="data appears twice"):
            one * other
        return
    assert one * other == other * one
    assert (one * other).ranks == one.ranks * other.ranks


def test_what_is_not_a_partition_does_not_multiply() -> None:
    for wrong in (2, "shard(2)", None):
        with pytest.raises(TypeError):
            data() * wrong


def test_it_is_written_as_it_is_typed() -> None:
    assert repr(shard(2) * data(3) * pipe(4)) == "data(3) * shard(2) * pipe(4)"
    assert repr(data()) == repr(shard(1)) == "data"
    assert shard(1) == data()


@pytest.mark.parametrize("cut", [data, shard, tensor, pipe])
@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", 65537])
def test_a_degree_is_a_whole_number_from_one_up(cut: object, wrong: object) -> None:
    with pytest.raises(BadArgument, match="a degree must be a whole number"):
        cut(wrong)  # type: ignore[operator]


def test_ranks_that_do_not_fit_are_told_what_would() -> None:
    with pytest.raises(UsageError, match=r"6 workers .* multiply to 4; start a multiple of 4"):
        (shard(2) * tensor(2)).replicas(6)
    with pytest.raises(UsageError, match=r"data\(3\) \* .* multiply to 6; start 6"):
        (data(3) * pipe(2)).replicas(4)
    assert (shard(2) * tensor(2)).replicas(12) == 3
