"""Deep gradient compression: momentum corrected, masked, clipped, and warmed up."""

from __future__ import annotations

import pytest
import torch

from shoal.axes.compression import Trait, Value, dgc, error_feedback, topk
from shoal.axes.compression.dgc import clipped, density
from shoal.errors import BadArgument, ConflictError
from shoal.rules import Facts
from shoal.strategy import parse
from shoal.testing.contracts.exchange import Case, exchange, tensors


def test_without_momentum_it_is_topk_with_feedback() -> None:
    mine = theirs = None
    for round in range(5):
        gradients = Case((8, 9), torch.float64, 3).gradients(round)
        one = exchange(dgc(0.1, 0.0), gradients, states=mine, round=round)
        two = exchange(error_feedback(topk(0.1)), gradients, states=theirs, round=round)
        mine, theirs = one.states, two.states
        assert torch.equal(one.ends[0].mean, two.ends[0].mean)


def test_sending_all_is_plain_gradients_for_the_factor_is_masked() -> None:
    """As in the paper: what is sent takes its momentum with it."""
    states = None
    for round in range(3):
        gradients = Case((7,), torch.float64, 2).gradients(round)
        one = exchange(dgc(1), gradients, states=states, round=round)
        states = one.states
        torch.testing.assert_close(one.ends[0].mean, torch.stack(gradients).mean(0))


def test_what_waits_gathers_velocity() -> None:
    """Paper, eq. 4 to 6: u = m u + g; v = v + u."""
    x = torch.tensor([1.0, 0.1], dtype=torch.float64)
    states = None
    u = v = 0.0
    for round in range(3):
        one = exchange(dgc(0.5, 0.9), [x], states=states, round=round)
        states = one.states
        u = 0.9 * u + 0.1
        v = v + u
        assert one.ends[0].mine.dense().tolist() == [1.0, 0.0]
        residual, velocity = states[0]
        assert residual.tolist() == pytest.approx([0.0, v])
        assert velocity.tolist() == pytest.approx([0.0, u])


def test_what_was_sent_and_what_is_kept_is_all_velocity() -> None:
    compressor = dgc(0.2, 0.7)
    case = Case((5, 6), torch.float64, 2)
    states = [compressor.init(Value(g, "weight")) for g in case.gradients()]
    total = sent = torch.zeros(5, 6, dtype=torch.float64)
    for round in range(6):
        gradients = case.gradients(round)
        total = total + 0.7 * states[0][1] + gradients[0]  # velocity, masked where it was sent
        one = exchange(compressor, gradients, states=states, round=round)
        states = one.states
        sent = sent + one.ends[0].mine.dense()
        torch.testing.assert_close(sent + states[0][0], total)


def test_density_falls_by_four_until_the_ratio() -> None:
    found = [density(0.01, 2, round) for round in range(10)]
    assert found == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01, 0.01, 0.01, 0.01]
    assert density(0.01, 0, 0) == 0.01
    assert density(0.5, 3, 0) == 0.5


def test_a_warm_up_sends_more_at_first() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    compressor = dgc(0.01, warmup=1)
    sent = [tensors(exchange(compressor, [x], round=r).asks[0][0])[1].numel() for r in range(5)]
    assert sent == [250, 62, 15, 10, 10]


def test_long_gradients_are_clipped_and_short_ones_left_alone() -> None:
    long = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(clipped(long, 1.0), torch.tensor([0.6, 0.8]))
    assert torch.equal(clipped(long, 5.0), long)
    assert torch.equal(clipped(torch.zeros(2), 1.0), torch.zeros(2))
    end = exchange(dgc(1, clip=1.0), [long]).ends[0]
    torch.testing.assert_close(end.mean, torch.tensor([0.6, 0.8]))


def test_it_shows_only_what_one_must_type() -> None:
    assert repr(dgc(0.01)) == "dgc(0.01)"
    assert repr(dgc(0.01, 0.5, clip=2, warmup=3)) == "dgc(0.01, 0.5, clip=2, warmup=3)"


def test_momentum_in_the_optimizer_is_a_conflict() -> None:
    assert Trait.MOMENTUM | Trait.CONSERVING in dgc(0.01).traits
    for text in ("dgc(0.01)", "esgd(0.01)", "momentum_correction(error_feedback(topk(0.01)))"):
        with pytest.raises(ConflictError, match="applies momentum"):
            parse(text).bind(Facts(ranks=2, momentum=True))
        assert parse(text).bind(Facts(ranks=2))


@pytest.mark.parametrize(
    "words",
    [{"momentum": 1.0}, {"momentum": True}, {"clip": 0}, {"warmup": -1}, {"warmup": 1.5}],
    ids=repr,
)
def test_numbers_out_of_range_are_refused(words: dict[str, float]) -> None:
    with pytest.raises(BadArgument, match="must"):
        dgc(0.01, **words)  # type: ignore[arg-type]
