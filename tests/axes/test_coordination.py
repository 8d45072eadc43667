"""Who agrees with whom, by hand; the laws of every W are in laws/."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.axes.coordination import all_reduce, bmuf, gossip, parameter_server, spectral_gap
from shoal.errors import BadArgument, UnknownName


def test_a_ring_of_four_takes_a_third_from_either_side() -> None:
    third = 1 / 3
    w = gossip("ring").mixing(4, 0)
    assert w[0].tolist() == pytest.approx([third, third, 0, third])
    assert w[2].tolist() == pytest.approx([0, third, third, third])


def test_a_ring_of_two_is_halves_and_of_one_is_itself() -> None:
    assert gossip().mixing(2, 0).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert gossip().mixing(1, 0).tolist() == [[1.0]]


@pytest.mark.parametrize("workers", [4, 5, 8, 16])
def test_the_gap_of_a_ring_is_what_the_cosine_says(workers: int) -> None:
    eigenvalues = [(1 + 2 * math.cos(2 * math.pi * k / workers)) / 3 for k in range(1, workers)]
    expected = 1 - max(map(abs, eigenvalues))
    assert spectral_gap(gossip().mixing(workers, 0)) == pytest.approx(expected)


def test_a_larger_ring_takes_longer_to_agree() -> None:
    gaps = [spectral_gap(gossip().mixing(n, 0)) for n in (3, 4, 6, 8, 12)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == pytest.approx(1)


def test_who_never_mixes_has_no_gap() -> None:
    assert spectral_gap(torch.eye(3)) == pytest.approx(0)
    assert spectral_gap(all_reduce().mixing(5, 0)) == pytest.approx(1)


def test_facts_of_the_members() -> None:
    assert (all_reduce().via, all_reduce().sends, all_reduce().servers) == (
        "collective",
        "gradient",
        0,
    )
    assert (parameter_server(3).via, parameter_server(3).servers) == ("server", 3)
    assert (gossip().via, gossip().sends) == ("peers", "parameter")
    assert (bmuf().via, bmuf().sends) == ("collective", "delta")


def test_block_momentum_is_called_what_one_types() -> None:
    given = [bmuf(), bmuf(0.5), bmuf(0.5, 0.8), bmuf(rate=0.8), bmuf(0, 1)]
    names = ["bmuf", "bmuf(0.5)", "bmuf(0.5, 0.8)", "bmuf(rate=0.8)", "bmuf(0)"]
    assert [repr(each) for each in given] == names
    for momentum in (1, -0.1, math.nan, True, "x"):
        with pytest.raises(BadArgument, match="momentum must be"):
            bmuf(momentum)  # type: ignore[arg-type]
    for rate in (0, 2.5, math.inf, None):
        with pytest.raises(BadArgument, match="rate must be"):
            bmuf(0.5, rate)  # type: ignore[arg-type]


def test_arguments_outside_their_range_are_refused() -> None:
    with pytest.raises(UnknownName, match="ring"):
        gossip("rong")
    for wrong in (0, 65, True, 1.5, "2"):
        with pytest.raises(BadArgument, match="from 1 to 64"):
            parameter_server(wrong)  # type: ignore[arg-type]
