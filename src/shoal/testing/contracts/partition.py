"""Laws of every partition: degrees multiply, and ranks that do not fit are refused."""

from __future__ import annotations

from shoal import notation
from shoal.axes import FUNCTIONS
from shoal.axes.partition import Partition
from shoal.errors import UsageError
from shoal.testing.contracts.require import require


def degrees_multiply_to_the_ranks(partition: Partition) -> None:
    """A replica has shard x tensor x pipe ranks, and ``replicas`` inverts that."""
    ranks = partition.shard * partition.tensor * partition.pipe
    require(partition.ranks == ranks, f"{partition}: {partition.ranks} ranks, not {ranks}")
    require(partition.cuts == (ranks > 1), f"{partition}: cuts")
    for replicas in (1, 2, 5) if partition.data is None else (partition.data,):
        result = partition.replicas(replicas * ranks)
        require(result == replicas, f"{partition}: {result} replicas of {replicas * ranks} ranks")


def ranks_that_do_not_fit_are_refused(partition: Partition) -> None:
    """The error names how many ranks there are and what the degrees multiply to."""
    each = partition.ranks * (partition.data or 1)
    wrong = each + 1
    if partition.data is None and wrong % partition.ranks == 0:
        return  # any number of ranks makes whole replicas
    try:
        partition.replicas(wrong)
    except UsageError as error:
        text = str(error)
        require(str(wrong) in text and str(each) in text, f"{partition}: {text!r} names no numbers")
        return
    raise AssertionError(f"{partition} takes {wrong} ranks")


def data_is_its_neutral_element(partition: Partition) -> None:
    """Multiplying by ``data`` changes nothing, from either side."""
    require(partition * Partition() == partition, f"{partition} * data is another")
    require(Partition() * partition == partition, f"data * {partition} is another")


def it_reads_back_as_it_is_written(partition: Partition) -> None:
    """This includes products, which no single function returns."""
    read = notation.call(repr(partition), FUNCTIONS, "technique")
    require(read == partition, f"{partition} reads back as {read}")


LAWS = (
    degrees_multiply_to_the_ranks,
    ranks_that_do_not_fit_are_refused,
    data_is_its_neutral_element,
    it_reads_back_as_it_is_written,
)
