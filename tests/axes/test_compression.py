"""What single compressors do, by hand; what all of them keep is in laws/."""

from __future__ import annotations

import pytest
import torch

from shoal.axes.compression import Trait, Value, cast, error_feedback, exact, powersgd, topk
from shoal.axes.compression.kit.sparse import code_nbytes
from shoal.axes.compression.powersgd import orthogonal
from shoal.errors import BadArgument, ConflictError
from shoal.flow import alone, drive
from shoal.testing.contracts.exchange import exchange, tensors


def test_topk_sends_the_largest_entries_and_nothing_else() -> None:
    x = torch.tensor([[0.1, -5.0, 2.0], [0.0, 3.0, -0.2]])
    end = drive(topk(0.34).flow(Value(x), None, 0), alone)
    assert torch.equal(end.mean, torch.tensor([[0, -5.0, 0], [0, 3.0, 0]]))


@pytest.mark.parametrize(("numel", "ratio", "sent"), [(100, 0.01, 1), (7, 0.5, 3), (3, 0.01, 1)])
def test_topk_sends_a_share_and_at_least_one(numel: int, ratio: float, sent: int) -> None:
    one = exchange(topk(ratio), [torch.randn(numel)])
    code, values = tensors(one.asks[0][0])
    assert values.shape == (sent,)
    assert code.nbytes == code_nbytes(sent, numel) <= 4 * sent


def test_the_mean_of_topk_is_over_all_workers_even_where_one_sent_nothing() -> None:
    one = exchange(topk(0.5), [torch.tensor([4.0, 1.0]), torch.tensor([1.0, 2.0])])
    assert torch.equal(one.ends[0].mean, torch.tensor([2.0, 1.0]))


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", 1.0), ("float16", 1.0009765625)])
def test_cast_rounds_to_what_sixteen_bits_hold(dtype: str, kept: float) -> None:
    end = exchange(cast(dtype), [torch.tensor([1 + 2**-10], dtype=torch.float64)]).ends[0]
    assert end.mean.item() == kept


def test_cast_of_what_is_narrow_already_keeps_its_own_message() -> None:
    """The wire overwrites what it is asked; what I said must not change with it."""
    mine = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    other = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    feedback = error_feedback(cast("bfloat16"))
    one = exchange(feedback, [mine.clone(), other], overwrites=True)
    assert torch.equal(one.ends[0].mine.dense(), mine)
    assert not one.ends[0].state[0].any()


@pytest.mark.parametrize("workers", [1, 3])
def test_powersgd_is_exact_on_matrices_of_its_rank(workers: int) -> None:
    chance = torch.Generator().manual_seed(0)
    u, v = (torch.randn(n, 2, generator=chance, dtype=torch.float64) for n in (9, 8))
    gradients = [
        u @ torch.diag(torch.tensor([1.0 + i, 2.0]).double()) @ v.T for i in range(workers)
    ]
    end = exchange(powersgd(2), gradients).ends[0]
    torch.testing.assert_close(end.mean, torch.stack(gradients).mean(0))


def test_powersgd_comes_closer_with_every_round_on_the_same_gradient() -> None:
    chance = torch.Generator().manual_seed(0)
    m = torch.randn(20, 15, generator=chance, dtype=torch.float64)
    state, lost = powersgd(1).init(Value(m, "w")), []
    for round in range(30):
        end = exchange(powersgd(1), [m], states=[state], round=round).ends[0]
        state = end.state
        lost.append(float((m - end.mine.dense()).norm()))
    best = float(torch.linalg.svdvals(m)[1:].norm())
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] == pytest.approx(best, rel=1e-3)


def test_powersgd_sends_rank_times_rows_and_columns() -> None:
    one = exchange(powersgd(2), [torch.randn(10, 4, 3)])
    assert [tensors(ask)[0].shape for ask in one.asks[0]] == [(2, 10), (2, 12)]


@pytest.mark.parametrize("shape", [(), (7,), (2, 2), (0, 4), (4, 0)])
def test_powersgd_sends_what_would_not_shrink_as_it_is(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    one = exchange(powersgd(1), [x.clone()])
    assert len(one.asks[0]) == 1
    assert torch.equal(one.ends[0].mean, x)


def test_powersgd_starts_from_the_name_so_that_all_workers_hold_the_same() -> None:
    m = torch.randn(6, 6)
    one, two, other = (powersgd(2).init(Value(m, name)) for name in ("a", "a", "b"))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_orthogonal_columns_are_of_length_one_and_at_right_angles(dtype: torch.dtype) -> None:
    q = orthogonal(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).to(dtype))
    assert q.dtype == dtype
    gram = (q.T @ q).double()
    torch.testing.assert_close(gram, torch.eye(3).double(), rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_error_feedback_sends_later_what_was_not_sent() -> None:
    compressor = error_feedback(topk(0.5))
    x = torch.tensor([4.0, 3.0])
    first = exchange(compressor, [x]).ends[0]
    assert torch.equal(first.mine.dense(), torch.tensor([4.0, 0.0]))
    second = exchange(compressor, [x], states=[first.state], round=1).ends[0]
    assert torch.equal(second.mine.dense(), torch.tensor([0.0, 6.0]))
    assert torch.equal(second.state[0], torch.tensor([4.0, 0.0]))


def test_error_feedback_keeps_the_facts_of_what_it_wraps() -> None:
    assert Trait.ONE_SHOT | Trait.SLICEABLE in error_feedback(topk(0.5)).traits
    assert Trait.SUMS in error_feedback(powersgd(1)).traits
    assert Trait.CONSERVING in error_feedback(cast()).traits
    assert not error_feedback(cast()).traits & (Trait.ELEMENTWISE | Trait.UNBIASED)


@pytest.mark.parametrize("inner", [exact(), error_feedback(topk(0.5))], ids=repr)
def test_error_feedback_refuses_what_it_cannot_help(inner: object) -> None:
    with pytest.raises(ConflictError, match="because"):
        error_feedback(inner)  # type: ignore[arg-type]


def test_error_feedback_refuses_what_is_no_contraction() -> None:
    inner = topk(0.5)
    loud = type(inner)("loud", Trait.NONE, inner.flow)
    with pytest.raises(ConflictError, match="grows without bound"):
        error_feedback(loud)
    with pytest.raises(BadArgument, match="must be a compressor"):
        error_feedback(topk)  # type: ignore[arg-type]
