"""by_size and after: which of two forms a tensor takes, and when."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shoal.axes.compression import (
    Compressor,
    Trait,
    after,
    by_size,
    cast,
    difference,
    error_feedback,
    exact,
    powersgd,
    topk,
)
from shoal.errors import BadArgument
from shoal.flow import Gather, Mean
from shoal.strategy import parse
from shoal.testing.contracts import check
from shoal.testing.contracts.exchange import exchange
from shoal.testing.trainer import LockstepTrainer, digits, tiny

FEEDBACK = error_feedback(topk(0.25))


def kinds(compressor: Compressor, numel: int, round: int = 0) -> list[type]:
    (asks,) = exchange(compressor, [torch.randn(numel)], round=round).asks
    return [type(ask) for ask in asks]


@pytest.mark.parametrize(("numel", "kind"), [(15, Mean), (16, Gather), (17, Gather)])
def test_a_tensor_is_large_from_the_threshold_on(numel: int, kind: type) -> None:
    assert kinds(by_size(64, exact(), topk(0.5)), numel) == [kind]


def test_a_size_is_written_with_its_unit() -> None:
    made = parse("by_size(64KB, exact, error_feedback(topk(0.01)))").compression
    assert made.name == "by_size(64KB, exact, error_feedback(topk(0.01)))"
    assert made == by_size(2**16, exact(), error_feedback(topk(0.01)))


def test_each_tensor_remembers_what_its_own_form_does() -> None:
    made = by_size(64, exact(), FEEDBACK)
    x = [torch.randn(8), torch.randn(100)]
    small, large = (exchange(made, [t]).ends[0].state for t in x)
    assert not small[0].any()
    plain = exchange(FEEDBACK, [x[1]]).ends[0].state
    assert torch.equal(large[0], plain[0])


BOTH = [
    (exact(), topk(0.5), Trait.CONTRACTIVE | Trait.SLICEABLE | Trait.ONE_SHOT),
    (exact(), exact(), Trait.LOSSLESS | Trait.UNBIASED | Trait.SUMS),
    (exact(), FEEDBACK, Trait.CONSERVING),
    (exact(), difference(topk(0.5)), Trait.TRACKS),
    (cast(), powersgd(1), Trait.SUMS | Trait.CONTRACTIVE),
]
NEITHER = [
    (exact(), topk(0.5), Trait.LOSSLESS | Trait.SUMS | Trait.ELEMENTWISE),
    (topk(0.5), FEEDBACK, Trait.CONSERVING),
    (cast(), difference(topk(0.5)), Trait.TRACKS | Trait.ONE_SHOT),
    (exact(), powersgd(1), Trait.SLICEABLE | Trait.ONE_SHOT),
]


@pytest.mark.parametrize(("small", "large", "traits"), BOTH, ids=repr)
def test_what_holds_of_both_holds(small: Compressor, large: Compressor, traits: Trait) -> None:
    assert traits in by_size(100, small, large).traits


@pytest.mark.parametrize(("small", "large", "traits"), NEITHER, ids=repr)
def test_what_one_lacks_is_not_claimed(small: Compressor, large: Compressor, traits: Trait) -> None:
    assert not by_size(100, small, large).traits & traits


@pytest.mark.parametrize(
    "made",
    [
        by_size(256, exact(), difference(topk(0.25))),
        by_size(256, exact(), powersgd(1)),
        error_feedback(by_size(256, exact(), topk(0.25))),
        error_feedback(after(1, topk(0.25))),
        after(1, by_size(256, exact(), FEEDBACK)),
        difference(by_size(256, cast(), topk(0.25))),
    ],
    ids=repr,
)
def test_wrappers_of_wrappers_keep_the_laws(made: Compressor) -> None:
    check(made)


def test_the_first_rounds_are_exact() -> None:
    made = after(2, topk(0.1))
    assert [kinds(made, 20, round) for round in range(4)] == [[Mean], [Mean], [Gather], [Gather]]
    x = [torch.randn(20), torch.randn(20)]
    ends = exchange(made, [t.clone() for t in x], round=1).ends
    torch.testing.assert_close(ends[0].mean, (x[0] + x[1]) / 2)


def test_what_comes_after_begins_as_if_nothing_had_been() -> None:
    made, chance = after(3, FEEDBACK), torch.Generator().manual_seed(0)
    xs = [torch.randn(30, generator=chance) for _ in range(6)]
    states, plain = None, None
    for round, x in enumerate(xs):
        states = exchange(made, [x], states=states, round=round).states
        if round >= 3:
            plain = exchange(FEEDBACK, [x], states=plain, round=round - 3).states
            assert torch.equal(states[0][0], plain[0][0])


@pytest.mark.parametrize("inner", [FEEDBACK, topk(0.25), powersgd(2), cast(), exact()], ids=repr)
def test_after_the_warm_up_the_laws_of_the_inner_hold(inner: Compressor) -> None:
    made = after(5, inner)
    check(dataclasses.replace(made, flow=lambda v, s, r: made.flow(v, s, r + 5), contraction=None))


def test_a_server_decodes_pushes_before_and_after_the_warm_up() -> None:
    made = LockstepTrainer(
        parse("parameter_server, asp, after(2, topk(0.5))"), workers=3, build=tiny
    )
    last = made.train(digits(12), steps=8)
    assert last < made.first


def test_wrappers_pass_on_how_far_neighbours_go() -> None:
    inner = difference(topk(0.5), 0.25)
    assert after(3, inner).gamma == by_size(64, exact(), inner).gamma == 0.25
    assert exact().gamma == 1


@pytest.mark.parametrize(
    "text",
    [
        "by_size(0, exact, topk(0.1))",
        "by_size(64KB, exact, x)",
        "by_size(x, exact, exact)",
        "after(0, topk(0.1))",
        "after(1.5, topk(0.1))",
        "after(10, x)",
    ],
)
def test_bad_arguments_are_named(text: str) -> None:
    with pytest.raises(BadArgument):
        parse(text)
