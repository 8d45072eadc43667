"""Laws of every partition. Degrees multiply, and numbers of ranks that do not fit are refused."""

from __future__ import annotations

from shoal import notation
from shoal.axes import FUNCTIONS
from shoal.axes.partition import Partition
from shoal.errors import UsageError
from shoal.testing.contracts.require import require


def degrees_multiply_to_the_ranks(partition: Partition) -> None:
    """A replica has shard x tensor x pipe ranks. ``replicas`` divides by this number."""
    ranks = partition.shard * partition.tensor * partition.pipe
    require(partition.ranks == ranks, f"{partition}: it has {partition.ranks} ranks, not {ranks}")
    require(partition.cuts == (ranks > 1), f"{partition}: cuts is wrong for {ranks} ranks")
    for replicas in (1, 2, 5) if partition.data is None else (partition.data,):
        result = partition.replicas(replicas * ranks)
        require(result == replicas, f"{partition}: it makes {result} replicas, not {replicas}")


def ranks_that_do_not_fit_are_refused(partition: Partition) -> None:
    """``replicas`` raises an error that names the number of ranks and the product of degrees."""
    each = partition.ranks * (partition.data or 1)
    wrong = each + 1
    if partition.data is None and wrong % partition.ranks == 0:
        return  # every number of ranks fits
    try:
        partition.replicas(wrong)
    except UsageError as error:
        text = str(error)
        require(str(wrong) in text and str(each) in text, f"{text!r} must name {wrong} and {each}")
        return
    raise AssertionError(f"{partition} must refuse {wrong} ranks")


def data_is_its_neutral_element(partition: Partition) -> None:
    """``partition * data`` and ``data * partition`` are equal to the partition."""
    require(partition * Partition() == partition, f"{partition} * data is not {partition}")
    require(Partition() * partition == partition, f"data * {partition} is not {partition}")


def it_reads_back_as_it_is_written(partition: Partition) -> None:
    """The repr of a partition, which may be a product, parses to an equal partition."""
    read = notation.call(repr(partition), FUNCTIONS, "technique")
    require(read == partition, f"{partition} is parsed as {read}")


LAWS = (
    degrees_multiply_to_the_ranks,
    ranks_that_do_not_fit_are_refused,
    data_is_its_neutral_element,
    it_reads_back_as_it_is_written,
)
