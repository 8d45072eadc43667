"""Quantisers: values checked by hand, bytes by formula, and nothing lost that is kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.axes.compression import (
    Compressor,
    Trait,
    Value,
    error_feedback,
    int8,
    natural,
    onebit,
    qsgd,
    sign,
    terngrad,
    twobit,
)
from shoal.axes.compression.kit.stochastic_rounding import generator, integers, rounded
from shoal.errors import BadArgument, ConflictError
from shoal.flow import alone, drive, nbytes
from shoal.testing.contracts.exchange import exchange, starts, tensors

ALL = (qsgd(16), terngrad(), natural(), int8(), onebit(), twobit(0.5), sign(), sign(0.9))
STOCHASTIC = (qsgd(1), qsgd(16), qsgd(127), terngrad(), natural())
CONSERVING = (onebit(), twobit(0.5))
each = pytest.mark.parametrize("compressor", ALL, ids=repr)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def said(compressor: Compressor, *gradients: list[float], round: int = 0) -> list[float]:
    given = [torch.tensor(g) for g in gradients]
    mean: list[float] = exchange(compressor, given, round=round).ends[0].mean.tolist()
    return mean


def test_int8_rounds_to_a_127th_of_the_largest_of_the_block() -> None:
    assert said(int8(2), [127.0, -3.4, 1.27, 0.016]) == pytest.approx([127, -3, 1.27, 0.02])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_int8_says_nothing_but_zeros_of_blocks_of_zeros(zero: float) -> None:
    ask = next(int8(4).flow(Value(torch.full((256,), zero)), None, 0))
    codes, scales = ask.parts
    assert not codes.any()
    assert not scales.any()


def test_int8_keeps_an_outlier_out_of_other_blocks() -> None:
    x = torch.cat([torch.tensor([1e6]), randn(255), randn(256, seed=1)])
    lost = (exchange(int8(256), [x]).ends[0].mine.dense() - x).abs()
    assert lost[1:256].max() > 1
    assert lost[256:].max() < 0.02


@pytest.mark.parametrize("block", [1, 3, 100, 70_000])
def test_int8_is_off_by_at_most_half_a_step(block: int) -> None:
    x = randn(70_500)
    mine = exchange(int8(block), [x]).ends[0].mine.dense()
    assert torch.all((mine - x).abs() <= x.abs().max() / 254 * 1.001)
    if block == 1:
        torch.testing.assert_close(mine, x)


def test_onebit_says_the_mean_of_each_side() -> None:
    one = exchange(onebit(), [torch.tensor([1.0, 3.0, -2.0, -4.0, -6.0])]).ends[0]
    assert one.mine.dense().tolist() == [2, 2, -4, -4, -4]
    assert one.state[0].tolist() == [-1, 1, 2, 0, -2]


def test_onebit_has_two_means_for_each_row_of_a_matrix() -> None:
    x = torch.cat([randn(1, 70).abs(), -10 * randn(2, 70).abs()])
    one = exchange(onebit(), [x])
    _, (high, low) = tensors(one.asks[0][0])
    torch.testing.assert_close(high, torch.tensor([float(x[0].mean()), 0, 0]))
    torch.testing.assert_close(low, torch.tensor([0, float(x[1].mean()), float(x[2].mean())]))
    torch.testing.assert_close(one.ends[0].mine.dense(), x.mean(1, keepdim=True).expand_as(x))


@pytest.mark.parametrize("shape", [(3, 70_000), (200_000,), (1000, 130), (4, 16, 3, 3)])
def test_onebit_is_the_same_however_long_a_row_is(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    rows = x.flatten(1) if x.dim() > 1 else x.view(1, -1)
    up = rows > 0
    high = (rows * up).sum(1, keepdim=True) / up.sum(1, keepdim=True)
    low = (rows * ~up).sum(1, keepdim=True) / (~up).sum(1, keepdim=True)
    expected = torch.where(up, high, low).view(shape)
    torch.testing.assert_close(exchange(onebit(), [x]).ends[0].mine.dense(), expected)


def test_twobit_sends_a_threshold_once_that_much_came_together() -> None:
    x, compressor = torch.tensor([0.3, -0.3, 1.2, 0.0, 0.5]), twobit(0.5)
    states = starts(compressor, [x])
    sent = []
    for round in range(3):
        end = exchange(compressor, [x], states=states, round=round).ends[0]
        states = [end.state]
        sent.append(end.mean.tolist())
    assert sent == [[0, 0, 0.5, 0, 0.5], [0.5, -0.5, 0.5, 0, 0.5], [0, 0, 0.5, 0, 0.5]]
    torch.testing.assert_close(states[0][0], torch.tensor([0.4, -0.4, 2.1, 0, 0]))


def test_sign_goes_where_the_most_workers_point() -> None:
    votes = ([5.0, -1.0, 1.0], [-0.1, -1.0, -9.0], [0.2, 3.0, -9.0])
    assert said(sign(), *votes) == [1, -1, -1]
    assert said(sign(), *votes[:2]) == [0, -1, 0]  # a tie stays


def test_sign_of_a_zero_among_others_cancels_over_two_rounds() -> None:
    assert said(sign(), [0.0, 2.0, -0.0], round=0) == [1, 1, 1]
    assert said(sign(), [0.0, 2.0, -0.0], round=1) == [-1, 1, -1]
    assert said(sign(), [0.0, 0.0], [3.0, -2.0]) == [1, -1]  # who has nothing to say is silent


def test_signum_votes_with_its_running_mean() -> None:
    compressor, states = sign(0.5), [torch.zeros(1)]
    votes = []
    for round, g in enumerate([4.0, -1.0, -1.0, -1.0]):
        end = exchange(compressor, [torch.tensor([g])], states=states, round=round).ends[0]
        states = [end.state]
        votes.append(end.mean.item())
    assert votes == [1, 1, -1, -1]  # of 2, 0.5, -0.25, -0.625
    assert states[0].item() == -0.625


def test_who_keeps_the_momentum_says_so() -> None:
    assert Trait.MOMENTUM in sign(0.9).traits
    assert Trait.MOMENTUM not in sign().traits
    assert sign(0.0) == sign() != sign(0.9)
    assert sign().init(Value(torch.ones(2))) is None


def test_natural_sends_powers_of_two_as_they_are_and_others_as_a_neighbour() -> None:
    powers = [1.0, -0.5, 2.0**-126, -(2.0**127), 0.0]
    assert said(natural(), powers) == powers
    found = {said(natural(), [3.0, -0.75], round=r)[k] for r in range(40) for k in (0, 1)}
    assert found == {2.0, 4.0, -0.5, -1.0}


def test_natural_loses_at_most_an_eighth_on_average() -> None:
    x = randn(100_000)
    lost = (exchange(natural(), [x]).ends[0].mine.dense() - x).square().sum()
    assert lost < x.square().sum() / 8


def test_qsgd_sends_levels_of_the_length_of_each_bucket() -> None:
    x = torch.cat([torch.tensor([3.0, 4.0]), torch.zeros(510), torch.tensor([-7.0])])
    assert said(qsgd(5), x.tolist()) == pytest.approx(x.tolist())  # 3/5 and 4/5 of 5, 5/5 of 7
    steps = exchange(qsgd(16), [randn(512)]).ends[0].mine.dense() * 16 / randn(512).norm()
    torch.testing.assert_close(steps, steps.round())


def test_terngrad_sends_the_largest_or_nothing() -> None:
    x = randn(1000)
    mine = exchange(terngrad(), [x]).ends[0].mine.dense()
    assert set(mine.unique().tolist()) == {-float(x.abs().max()), 0.0, float(x.abs().max())}
    assert mine[x.abs().argmax()] == x[x.abs().argmax()]


@pytest.mark.parametrize(
    ("compressor", "formula"),
    [
        (qsgd(16), lambda n: 6 * n / 8 + 4 * n / 512),
        (qsgd(7), lambda n: 4 * n / 8 + 4 * n / 512),
        (qsgd(1), lambda n: 2 * n / 8 + 4 * n / 512),
        (terngrad(), lambda n: 2 * n / 8),
        (natural(), lambda n: 9 * n / 8),
        (int8(256), lambda n: n + 4 * n / 256),
        (onebit(), lambda n: n / 8 + 8 * math.sqrt(n)),
        (twobit(0.5), lambda n: 2 * n / 8),
        (sign(), lambda n: n / 8),
        (sign(0.9), lambda n: n / 8),
    ],
    ids=lambda given: repr(given) if isinstance(given, Compressor) else "",
)
def test_bytes_on_the_wire_are_those_of_the_formula(
    compressor: Compressor, formula: Callable[[int], float]
) -> None:
    for side in (120, 515):
        sizes: list[int] = []

        def answer(ask: object, sizes: list[int] = sizes) -> object:
            sizes.append(nbytes(ask))  # type: ignore[arg-type]
            return alone(ask)  # type: ignore[arg-type]

        value = Value(randn(side, side), "w")
        drive(compressor.flow(value, compressor.init(value), 0), answer)
        assert sum(sizes) == pytest.approx(formula(side * side), rel=0.05)


@pytest.mark.parametrize("compressor", STOCHASTIC, ids=repr)
def test_unbiased_over_many_entries_and_over_workers(compressor: Compressor) -> None:
    """One of 10^9 runs of a true member would fail: the sum of errors is beyond six sigma."""
    x = randn(300, 301)
    mines = torch.stack([exchange(compressor, [x], round=r).ends[0].mine.dense() for r in range(4)])
    errors = (mines - x).double()
    assert abs(errors.sum()) < 6 * errors.square().sum().sqrt()
    big = x.abs() > 1  # and no less where numbers are of a kind
    assert abs((errors * x.sign())[:, big].sum()) < 6 * errors[:, big].square().sum().sqrt()


@pytest.mark.parametrize("compressor", STOCHASTIC, ids=repr)
def test_workers_err_independently_so_that_their_mean_errs_less(compressor: Compressor) -> None:
    gradients = [randn(64, 64) + 1e-3 * randn(64, 64, seed=w) for w in range(1, 17)]
    one = exchange(compressor, gradients)
    ends = zip(one.ends, gradients, strict=True)
    alone = sum(float((end.mine.dense() - g).square().sum()) for end, g in ends) / 16
    together = float((one.ends[0].mean - torch.stack(gradients).mean(0)).square().sum())
    assert together < 1.5 * alone / 16


@pytest.mark.parametrize("compressor", CONSERVING, ids=repr)
@pytest.mark.parametrize("shape", [(), (0,), (33,), (4, 100)])
def test_what_was_sent_and_the_residual_are_all_there_was(
    compressor: Compressor, shape: tuple[int, ...]
) -> None:
    states = starts(compressor, [torch.zeros(shape)] * 3)
    meant = sent = torch.zeros(shape)
    for round in range(20):
        gradients = [randn(*shape, seed=10 * round + w) for w in range(3)]
        one = exchange(compressor, gradients, states=states, round=round)
        states = one.states
        meant, sent = meant + torch.stack(gradients).mean(0), sent + one.ends[0].mean
    residual = torch.stack([state[0] for state in states]).mean(0)
    torch.testing.assert_close(sent + residual, meant, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compressor", CONSERVING, ids=repr)
def test_who_keeps_a_residual_is_not_given_another(compressor: Compressor) -> None:
    with pytest.raises(ConflictError, match="keeps its own residual already"):
        error_feedback(compressor)


@pytest.mark.parametrize("compressor", [qsgd(4), terngrad(), sign()], ids=repr)
def test_feedback_is_refused_where_the_residual_would_grow(compressor: Compressor) -> None:
    with pytest.raises(ConflictError, match="grows without bound"):
        error_feedback(compressor)


@pytest.mark.parametrize("compressor", [int8(), natural()], ids=repr)
def test_feedback_is_welcome_where_little_is_lost(compressor: Compressor) -> None:
    assert Trait.CONSERVING in error_feedback(compressor).traits


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_precision_is_taken_and_given_back(
    compressor: Compressor, dtype: torch.dtype
) -> None:
    x = (5 * randn(7, 11)).to(dtype)
    end = exchange(compressor, [x, 2 * x]).ends[0]
    assert end.mean.dtype == end.mine.dense().dtype == dtype
    wide = exchange(compressor, [x.double(), 2 * x.double()]).ends[0]
    if Trait.UNBIASED not in compressor.traits:
        torch.testing.assert_close(end.mean.double(), wide.mean, rtol=0.02, atol=0.02)


@each
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-42, 1e15])
def test_however_small_or_large_it_stays_finite(compressor: Compressor, factor: float) -> None:
    end = exchange(compressor, [factor * randn(600)]).ends[0]
    assert end.mean.isfinite().all()
    assert end.mine.dense().isfinite().all()
    if factor == 0:
        assert not end.mine.dense().any()


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_not_hidden(compressor: Compressor, bad: float) -> None:
    x = randn(100)
    x[50] = bad
    for round in range(8):
        end = exchange(compressor, [x, randn(100)], round=round).ends[0]
        assert not end.mean.isfinite().all()


@each
def test_adding_up_takes_any_strides_and_long_tensors(compressor: Compressor) -> None:
    x = randn(300, 500)
    one = exchange(compressor, [x])
    into = torch.ones(500, 300).T
    assert compressor.add is not None
    compressor.add(tensors(one.asks[0][0]), into, 2.0)
    torch.testing.assert_close(into, 1 + 2 * one.ends[0].mine.dense())


@pytest.mark.parametrize(
    "wrong",
    [
        *itertools.product([qsgd], [0, 128, 1.5, True]),
        *itertools.product([int8], [0, 2.5, True]),
        *itertools.product([twobit], [0, -1.0, math.inf, math.nan, True, "x"]),
        *itertools.product([sign], [1, -0.1, math.nan, True, "x"]),
    ],
    ids=lambda w: f"{w[0].__name__}({w[1]})",
)
def test_arguments_that_make_no_sense_are_refused(
    wrong: tuple[Callable[[object], Compressor], object],
) -> None:
    make, value = wrong
    with pytest.raises(BadArgument, match="must"):
        make(value)


@pytest.mark.parametrize("levels", [1, 2, 16, 127])
def test_rounding_leaves_whole_numbers_alone_and_is_uniform(levels: int) -> None:
    chance = torch.Generator().manual_seed(0)
    whole = torch.arange(-levels, levels + 1).float().repeat(1000)
    assert torch.equal(rounded(whole, levels, chance), (whole + levels).to(torch.uint8))
    share = rounded(torch.full((200_000,), 0.3), levels, chance).float().mean() - levels
    assert abs(float(share) - 0.3) < 7 * math.sqrt(0.21 / 200_000)


def test_chance_depends_on_name_round_and_content_and_on_nothing_else() -> None:
    x = randn(5000)
    draws = [
        integers(8, torch.int64, generator(name, content, round)).tolist()
        for name, content, round in [("w", x, 0), ("v", x, 0), ("w", x, 1), ("w", 2 * x, 0)]
    ]
    assert len({tuple(draw) for draw in draws}) == 4
    torch.manual_seed(5)
    assert integers(8, torch.int64, generator("w", x.clone(), 0)).tolist() == draws[0]
