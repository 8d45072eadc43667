"""A law that nobody can break proves nothing: every law finds a member that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.axes.collectives import ring
from shoal.axes.compression import Compressor, Trait, Value, cast, error_feedback, exact, topk
from shoal.axes.compression.compressor import add_dense
from shoal.axes.scheduling import fifo
from shoal.flow import Agreed, Dense, Flow, Mean
from shoal.testing.contracts import check, check_member, laws_of, make, samples
from shoal.testing.contracts.matrix import legal, samples_by_axis
from shoal.testing.contracts.require import close, same

Send = Callable[[Tensor, Any, int], Tensor]


def compressor(send: Send, traits: Trait = Trait.NONE, **more: Any) -> Compressor:
    """What sends ``send(gradient, state, round)`` as a mean."""

    def flow(value: Value, state: Any, round: int) -> Flow:
        sent = send(value.tensor, state, round)
        mine = Dense(sent.clone())
        return Agreed((yield Mean(sent)), mine, state)

    return Compressor("broken", traits, flow, **more)


def aliased(value: Value, state: None, round: int) -> Flow:
    """Forgets that the wire may overwrite."""
    sent = value.tensor.clone()
    return Agreed((yield Mean(sent)), Dense(sent), None)


def silent(value: Value, state: None, round: int) -> Flow:
    """Tells less than it sent."""
    mine = Dense(value.tensor / 2)
    return Agreed((yield Mean(value.tensor.clone())), mine, None)


def shared(value: Value, state: None, round: int) -> Flow:
    """Returns what it sent in the memory of the value."""
    return Agreed((yield Mean(value.tensor.clone())), Dense(value.tensor), None)


def adrift(value: Value, state: None, round: int) -> Flow:
    mean = yield Mean(value.tensor.clone())
    return Agreed(mean + 1e-9 * value.tensor, Dense(value.tensor.clone()), None)


def twice(value: Value, state: None, round: int) -> Flow:
    yield Mean(value.tensor.clone())
    return Agreed((yield Mean(value.tensor.clone())), Dense(value.tensor.clone()), None)


def greedy(value: Value, state: Tensor, round: int) -> Flow:
    state += 1
    return Agreed((yield Mean(value.tensor.clone())), Dense(value.tensor.clone()), state)


def flattened(value: Value, state: None, round: int) -> Flow:
    mean = yield Mean(value.tensor.flatten().clone())
    return Agreed(mean, Dense(value.tensor.flatten()), None)


def count(value: Value) -> Tensor:
    return torch.zeros(1)


class Opaque:
    """Cannot be saved without running code."""


chance = torch.Generator().manual_seed(0)
topk_flow = topk(0.5).flow

BROKEN: dict[str, Compressor] = {
    "mean_of_what_was_sent_is_the_mean": Compressor("silent", Trait.NONE, silent),
    "own_message_survives_an_overwriting_wire": Compressor("aliased", Trait.NONE, aliased),
    "what_was_sent_can_be_subtracted": Compressor("shared", Trait.CONTRACTIVE, shared),
    "all_workers_end_with_the_same_bits": Compressor("adrift", Trait.NONE, adrift),
    "what_comes_out_looks_like_what_went_in": Compressor("flat", Trait.NONE, flattened),
    "strides_do_not_matter": compressor(
        lambda g, s, r: g.clone() if g.is_contiguous() else torch.zeros_like(g)
    ),
    "the_same_again_gives_the_same": compressor(
        lambda g, s, r: g * torch.rand((), generator=chance, dtype=torch.float64).to(g.dtype)
    ),
    "inputs_are_not_changed": Compressor("greedy", Trait.NONE, greedy, count),
    "state_survives_saving": compressor(lambda g, s, r: g.clone(), init=lambda v: Opaque()),
    "all_workers_send_as_much": compressor(
        lambda g, s, r: g.clone() if g.sum() > 0 else g.double().to(torch.float64)
    ),
    "lossless_is_the_exact_mean": compressor(lambda g, s, r: g * 0.999, Trait.LOSSLESS),
    "unbiased_is_right_on_average": compressor(lambda g, s, r: g * 0.999, Trait.UNBIASED),
    "contractive_loses_less_than_there_was": compressor(lambda g, s, r: -g, Trait.CONTRACTIVE),
    "conserving_loses_nothing_over_time": compressor(
        lambda g, s, r: g / 2, Trait.CONSERVING, init=lambda v: (torch.zeros_like(v.tensor),)
    ),
    "one_shot_is_decoded_by_add": Compressor("twice", Trait.ONE_SHOT, twice, add=add_dense),
    "sums_asks_for_means_only": Compressor("gathers", Trait.SUMS, topk_flow),
    "elementwise_takes_a_bucket_as_one": compressor(
        lambda g, s, r: g - (g.mean() if g.numel() else 0), Trait.ELEMENTWISE
    ),
    "sliceable_acts_on_any_piece": Compressor("whole", Trait.SLICEABLE, flattened),
    "tracks_comes_ever_closer": compressor(lambda g, s, r: g * 0.5, Trait.TRACKS),
    "unscaled_ignores_the_length": compressor(lambda g, s, r: g * 1.0, Trait.UNSCALED),
    "momentum_outlasts_the_gradient": compressor(lambda g, s, r: g * 1.0, Trait.MOMENTUM),
}


def law(value: Any, name: str) -> Callable[[Any], None]:
    return next(law for law in laws_of(value) if law.__name__ == name)


@pytest.mark.parametrize("name", [n for n in BROKEN if not n.startswith("sliceable")])
def test_the_law_finds_a_compressor_that_breaks_it(name: str) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        law(BROKEN[name], name)(BROKEN[name])
    assert caught.type is AssertionError or name == "state_survives_saving"


def test_every_law_of_compressors_has_one_that_breaks_it() -> None:
    names = {law.__name__ for law in laws_of(exact())} - {"it_is_a_frozen_value"}
    assert set(BROKEN) == names


def test_a_slice_must_come_out_as_a_slice() -> None:
    broken = compressor(lambda g, s, r: g[:1] * 1.0 if g.dim() else g * 1.0, Trait.SLICEABLE)
    with pytest.raises(AssertionError, match="slice 3:40: the result has shape"):
        law(broken, "sliceable_acts_on_any_piece")(broken)


def test_unbiased_noise_is_found_unbiased() -> None:
    """The law does not cry wolf over a compressor that is right on average only."""

    def dither(g: Tensor, state: None, round: int) -> Tensor:
        noise = torch.rand(g.shape, generator=torch.Generator().manual_seed(round))
        return (g + noise.to(g.dtype)).floor()

    good = compressor(dither, Trait.UNBIASED)
    law(good, "unbiased_is_right_on_average")(good)


def test_who_claims_one_shot_must_say_how_it_is_added() -> None:
    broken = compressor(lambda g, s, r: g.clone(), Trait.ONE_SHOT)
    with pytest.raises(AssertionError, match="has no add"):
        check(broken)


def test_error_feedback_without_a_copy_is_found() -> None:
    """The slip that a wire in place makes fatal: residual from what the wire overwrote."""

    def flow(value: Value, state: tuple[Tensor], round: int) -> Flow:
        wanted = value.tensor + state[0]
        mean = yield Mean(wanted)
        return Agreed(mean, Dense(wanted), (wanted - mean,))

    broken = Compressor(
        "ef", Trait.CONSERVING, flow, lambda value: (torch.zeros_like(value.tensor),)
    )
    with pytest.raises(AssertionError):
        check(broken)


def test_what_is_of_no_axis_is_told_so() -> None:
    with pytest.raises(AssertionError, match="of no axis"):
        check(3)


def test_what_can_be_changed_is_found() -> None:
    value = exact()
    loose = type("Loose", (Compressor,), {"__setattr__": object.__setattr__})
    broken = loose(value.name, value.traits, value.flow, add=value.add)
    with pytest.raises(AssertionError, match="can be changed"):
        check(broken)


def half(share: float) -> Compressor:
    """Send a share of every number.

    Args:
        share: of each.

    Example: ``half(0.5)``, ``half(1)``.
    """
    return compressor(lambda g, s, r: g * share)


def quiet(share: float) -> Compressor:
    """Shows no sample."""
    return half(share)


def test_samples_come_from_the_example_line_or_the_bare_name() -> None:
    assert samples(half) == ("half(0.5)", "half(1)")
    assert samples(fifo) == ("fifo", "fifo(1)")
    assert samples(exact) == ("exact",)
    assert len(samples(error_feedback)) == 4
    with pytest.raises(AssertionError, match=r"quiet needs share, .* add a line such as"):
        samples(quiet)


def test_a_member_of_ones_own_is_checked_like_shoals() -> None:
    with pytest.raises(AssertionError, match="needs References"):
        check_member(half)
    assert make("half(0.5)", half).name == "broken"
    assert make("topk(0.5)") == topk(0.5)


def test_a_member_of_ones_own_joins_the_matrix() -> None:
    given = samples_by_axis(half)
    assert [c.name for c in given["compression"]][-2:] == ["broken", "broken"]
    product = {axis: values[0] for axis, values in given.items()}
    assert legal({**product, "compression": given["compression"][-1]}) is not None
    assert legal({**product, "synchrony": make("asp")}) is None


def test_states_are_compared_to_the_last_bit() -> None:
    one = {"a": (torch.ones(2), [1, "x", None])}
    assert same(one, {"a": (torch.ones(2), [1, "x", None])})
    assert not same(one, {"a": (torch.ones(2) + 1e-7, [1, "x", None])})
    assert not same(one, {"a": (torch.ones(2), [1, "x"])})
    assert not same(torch.ones(2), torch.ones(2).double())
    assert not close(torch.ones(2), torch.ones(3), 1.0)


def test_cast_is_what_the_laws_say_it_is() -> None:
    check(cast("bfloat16"))
    check(ring())
