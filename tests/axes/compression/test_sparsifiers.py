"""What single sparsifiers do, by hand; what all of them keep is in laws/."""

from __future__ import annotations

import pytest
import torch

from shoal.axes.compression import (
    Compressor,
    Trait,
    cast,
    dgc,
    error_feedback,
    esgd,
    exact,
    gtopk,
    momentum_correction,
    powersgd,
    random_k,
    threshold,
    topk,
)
from shoal.axes.compression.esgd import important
from shoal.axes.compression.kit.bit_packing import pack, unpack
from shoal.axes.compression.kit.sparse import code_nbytes
from shoal.axes.compression.random_k import draw
from shoal.errors import BadArgument, ConflictError
from shoal.flow import nbytes
from shoal.testing.contracts.exchange import Case, exchange, tensors

KEEPERS = [
    error_feedback(topk(0.1)),
    error_feedback(random_k(0.1)),
    threshold(0.5, 0.1),
    gtopk(0.1),
]


def wrapped(inner: Compressor) -> Compressor:
    """The general wrapper, though inner knows better."""
    plain = Compressor(inner.name, inner.traits, inner.flow, inner.init, inner.add)
    return error_feedback(plain)


@pytest.mark.parametrize("compressor", KEEPERS, ids=repr)
def test_what_was_sent_and_what_is_kept_is_all_there_was(compressor: Compressor) -> None:
    case = Case((40_000,), torch.float64, 3)
    states, sent, meant = None, torch.zeros(case.shape), torch.zeros(case.shape)
    for round in range(4):
        gradients = case.gradients(round)
        one = exchange(compressor, gradients, states=states, round=round)
        states = one.states
        meant = meant + torch.stack(gradients).sum(0)
        sent = sent + 3 * one.ends[0].mean
    kept = torch.stack([state[0] for state in one.states]).sum(0)
    torch.testing.assert_close(sent + kept, meant, rtol=0, atol=1e-9)


def test_topk_under_feedback_is_what_the_general_wrapper_makes_of_it() -> None:
    states = None
    for round in range(4):
        gradients = Case((6, 7), torch.float64, 2).gradients(round)
        one, two = (
            exchange(c, gradients, states=states, round=round)
            for c in (error_feedback(topk(0.2)), wrapped(topk(0.2)))
        )
        for a, b in zip(one.ends, two.ends, strict=True):
            assert torch.equal(a.mean, b.mean)
            assert torch.equal(a.mine.dense(), b.mine.dense())
            assert torch.equal(a.state[0], b.state[0])
        states = one.states


def test_random_k_is_scaled_alone_and_not_under_feedback() -> None:
    x = torch.arange(1.0, 9.0)
    alone = exchange(random_k(0.25), [x]).ends[0].mine.dense()
    fed = exchange(error_feedback(random_k(0.25)), [x]).ends[0]
    assert torch.equal(alone, 4 * fed.mine.dense())
    assert torch.equal(fed.mine.dense() + fed.state[0], x)
    assert int(fed.mine.dense().count_nonzero()) == 2


def test_random_k_sends_values_only_of_entries_that_all_workers_chose() -> None:
    one = exchange(random_k(0.1), Case((30, 10), torch.float32, 3).gradients())
    assert [t.shape for t in tensors(one.asks[0][0])] == [(30,)]
    places = [set(end.mine.dense().flatten().nonzero().flatten().tolist()) for end in one.ends]
    assert places[0] == places[1] == places[2]


def test_random_k_draws_anew_by_seed_round_and_name() -> None:
    first = draw(50, 5000, "0/0/w")
    assert torch.equal(first, draw(50, 5000, "0/0/w"))
    others = [draw(50, 5000, key) for key in ("1/0/w", "0/1/w", "0/0/b")]
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("k", "numel"), [(3, 100), (30, 100), (100, 100), (0, 0), (1, 1)])
def test_drawn_places_are_different_and_each_as_likely(k: int, numel: int) -> None:
    hits = torch.zeros(numel)
    for round in range(300):
        where = draw(k, numel, str(round))
        assert torch.equal(where, torch.unique(where))
        assert where.numel() == k
        hits[where] += 1
    expected = 300 * k / max(1, numel)
    assert bool(((hits - expected).abs() <= 6 * expected**0.5 + 1e-6).all())


def test_threshold_sends_tau_of_what_has_grown_beyond_it() -> None:
    compressor = threshold(1.0, 0.5)
    x = torch.tensor([2.5, -1.2, 0.4, 0.0])
    first = exchange(compressor, [x]).ends[0]
    assert torch.equal(first.mine.dense(), torch.tensor([1.0, -1.0, 0.0, 0.0]))
    second = exchange(compressor, [torch.zeros(4)], states=[first.state], round=1).ends[0]
    assert torch.equal(second.mine.dense(), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert torch.allclose(second.state[0], torch.tensor([0.5, -0.2, 0.4, 0.0]))


def test_what_finds_no_room_below_the_threshold_waits() -> None:
    end = exchange(threshold(1.0, 0.25), [torch.tensor([3.0, 2.0, -9.0, 4.0])]).ends[0]
    assert torch.equal(end.mine.dense(), torch.tensor([0.0, 0.0, -1.0, 0.0]))
    assert torch.equal(end.state[0], torch.tensor([3.0, 2.0, -8.0, 4.0]))


def test_threshold_takes_two_bits_and_a_place_for_each_entry() -> None:
    ask = exchange(threshold(1.0, 0.01), [torch.randn(100_000)]).asks[0][0]
    assert nbytes(ask) == 250 + code_nbytes(1000, 100_000)


@pytest.mark.parametrize("k", [0, 1, 3, 4, 5, 9])
def test_signs_read_back(k: int) -> None:
    signs = torch.randint(-1, 2, (k,), generator=torch.Generator().manual_seed(k)).float()
    packed = pack((signs + 1).to(torch.uint8), 2)
    assert packed.nbytes == -(-k // 4)
    assert torch.equal(unpack(packed, 2, k).float() - 1, signs)


def test_esgd_takes_what_was_hit_and_what_is_large() -> None:
    row = torch.tensor([0.1, -5.0, 0.2, 4.0, 0.0])
    hits = torch.tensor([3, 0, 2, 0, 0], dtype=torch.int32)
    assert important(row, hits, 2).tolist() == [0, 1]
    assert important(row, hits, 4).tolist() == [0, 1, 2, 3]
    assert important(torch.zeros(5), hits, 4).numel() == 4


def test_esgd_forgets_what_others_contradict() -> None:
    gradients = [torch.tensor([4.0, 1.0]), torch.tensor([-9.0, 1.0])]
    one = exchange(esgd(1.0), gradients)
    assert [state[2].tolist() for state in one.states] == [[0, 1], [1, 1]]


@pytest.mark.parametrize("inner", [topk(0.5), powersgd(1), cast()], ids=repr)
def test_momentum_correction_gives_velocity_to_what_it_wraps(inner: Compressor) -> None:
    compressor = momentum_correction(error_feedback(inner), 0.5)
    case = Case((5, 6), torch.float64, 2)
    states, velocity, total, sent = None, 0.0, torch.zeros(5, 6), torch.zeros(5, 6)
    for round in range(4):
        gradients = case.gradients(round)
        one = exchange(compressor, gradients, states=states, round=round, overwrites=True)
        states = one.states
        velocity = 0.5 * velocity + gradients[0]
        total, sent = total + velocity, sent + one.ends[0].mine.dense()
    torch.testing.assert_close(one.ends[0].state[-1], velocity)
    torch.testing.assert_close(sent + one.ends[0].state[0], total)


@pytest.mark.parametrize("keeper", [dgc(0.1), esgd(0.1), gtopk(0.1), threshold(1.0)], ids=repr)
def test_feedback_around_what_keeps_its_residual_is_a_conflict(keeper: Compressor) -> None:
    with pytest.raises(ConflictError, match="keeps its own residual"):
        error_feedback(keeper)


def test_momentum_twice_or_without_need_is_a_conflict() -> None:
    with pytest.raises(ConflictError, match="momentum once more"):
        error_feedback(momentum_correction(topk(0.1)))
    with pytest.raises(ConflictError, match="its own momentum"):
        momentum_correction(dgc(0.1))
    with pytest.raises(ConflictError, match="nothing is sent late"):
        momentum_correction(exact())
    with pytest.raises(BadArgument, match="must be a compressor"):
        momentum_correction(0.9)  # type: ignore[arg-type]
    assert Trait.MOMENTUM in momentum_correction(topk(0.1)).traits


@pytest.mark.parametrize(
    "make",
    [
        lambda: random_k(0),
        lambda: random_k(0.1, seed=0.5),  # type: ignore[arg-type]
        lambda: threshold(0),
        lambda: threshold(float("inf")),
        lambda: threshold(1.0, 2),
        lambda: gtopk(1.5),
        lambda: esgd(True),
        lambda: esgd(0.1, 1.0),
        lambda: momentum_correction(topk(0.1), -0.1),
    ],
)
def test_numbers_out_of_range_are_refused(make: object) -> None:
    with pytest.raises(BadArgument, match="must"):
        make()  # type: ignore[operator]
