"""The covering array covers, and is small."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shoal.testing.contracts.matrix import cover

rows = st.lists(st.tuples(*[st.integers(0, 2)] * 4), max_size=40)


def combinations(rows: list[tuple[int, ...]], strength: int) -> set[object]:
    return {c for row in rows for c in itertools.combinations(enumerate(row), strength)}


@given(rows, st.sampled_from([1, 2, 3]))
def test_every_combination_that_occurs_still_occurs(
    rows: list[tuple[int, ...]], strength: int
) -> None:
    chosen = [rows[i] for i in cover(rows, strength)]
    assert combinations(chosen, strength) == combinations(rows, strength)


@given(rows)
def test_no_row_comes_twice(rows: list[tuple[int, ...]]) -> None:
    chosen = [rows[i] for i in cover(rows)]
    assert len(chosen) == len(set(chosen))


def test_pairs_need_far_fewer_rows_than_products() -> None:
    table = list(itertools.product(range(4), range(4), range(4), range(4), range(4)))
    chosen = cover(table)
    assert len(table) == 1024
    assert 16 <= len(chosen) <= 32


def test_single_entries_need_as_many_rows_as_the_longest_column() -> None:
    table = list(itertools.product(range(5), range(3)))
    assert len(cover(table, strength=1)) == 5
