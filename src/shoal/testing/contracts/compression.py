"""Laws of every compressor: what holds for all of them, and what each trait promises."""

from __future__ import annotations

import copy
import io
import math

import torch

from shoal.axes.compression import Compressor, Trait
from shoal.flow import Fold, Gather, Mean
from shoal.testing.contracts.exchange import CASES, Case, exchange, rounds, starts, tensors
from shoal.testing.contracts.require import close, require, same

DRAWS = 400
SIGMAS = 7.0
"""UNBIASED is tested with this many draws: a true claim fails for one number in 10^11."""


def mean_of_what_was_sent_is_the_mean(compressor: Compressor) -> None:
    """``mine``, averaged over the workers, is ``mean``: what is lost is lost before sending."""
    if Trait.MERGES in compressor.traits:
        return
    for case in CASES:
        for number, (_, one) in enumerate(rounds(compressor, case)):
            if Trait.LOSSLESS in compressor.traits and number % 2:
                continue  # all was sent, so no copy need be kept from a wire that overwrites
            sent = torch.stack([end.mine.dense() for end in one.ends]).double().mean(0)
            label = f"{compressor}, {case}, round {number}: mean is not the mean of what was sent"
            require(close(one.ends[0].mean, sent, one.tolerance), label)


def own_message_survives_an_overwriting_wire(compressor: Compressor) -> None:
    """A wire may overwrite the tensor of an ask; ``mine`` and the state must not change with it."""
    if Trait.LOSSLESS in compressor.traits:
        return  # all was sent, so no copy need be kept
    for case in CASES:
        results = []
        for overwrites in (False, True):
            ends = exchange(compressor, case.gradients(), overwrites=overwrites).ends
            results.append([(end.mine.dense(), end.state) for end in ends])
        label = f"{compressor}, {case}: loses its own message to a wire that overwrites"
        require(same(*results), label)


def what_was_sent_can_be_subtracted(compressor: Compressor) -> None:
    """``mine.subtract_from(x)`` gives ``x - mine.dense()``.

    CONTRACTIVE: also where x is the value that was sent, as in error feedback; so ``mine`` must not
    share its memory.
    """
    for case in CASES:
        gradients = case.gradients()
        ends = exchange(compressor, gradients).ends
        sent = [end.mine.dense().clone() for end in ends]
        for end, dense, x in zip(ends, sent, case.gradients(1), strict=True):
            expected = x - dense
            end.mine.subtract_from(x)
            right = close(x, expected, 8 * torch.finfo(case.dtype).eps)
            require(right, f"{compressor}, {case}: subtracts something else than was sent")
        if Trait.CONTRACTIVE in compressor.traits:
            for gradient in gradients:
                gradient.zero_()
            apart = same([end.mine.dense() for end in ends], sent)
            require(apart, f"{compressor}, {case}: what was sent changes with the value")


def all_workers_end_with_the_same_bits(compressor: Compressor) -> None:
    """Replicas must not diverge by rounding."""
    for case in CASES:
        for _, one in rounds(compressor, case):
            agreed = all(torch.equal(end.mean, one.ends[0].mean) for end in one.ends)
            require(agreed, f"{compressor}, {case}: workers hold different means")


def what_comes_out_looks_like_what_went_in(compressor: Compressor) -> None:
    """Shape and type are kept, and finite numbers stay finite, zeros too."""
    for case in CASES:
        nothing = [torch.zeros_like(g) for g in case.gradients()]
        quiet = exchange(compressor, nothing)
        label = f"{compressor}, {case}"
        require(all(not end.mean.any() for end in quiet.ends), f"{label}: something out of nothing")
        one = exchange(compressor, case.gradients(), states=quiet.states, round=1)
        for end in one.ends:
            for out in (end.mean, end.mine.dense()):
                require(out.shape == case.shape, f"{label}: comes out as {tuple(out.shape)}")
                require(out.dtype == case.dtype, f"{label}: comes out as {out.dtype}")
                require(bool(out.isfinite().all()), f"{label}: not finite after a zero gradient")


def strides_do_not_matter(compressor: Compressor) -> None:
    """A transposed or channels-last view has the same numbers."""
    for shape in ((5, 6), (4, 3, 2, 2)):
        plain = Case(shape, torch.float64, 2).gradients()
        strided = [g.transpose(0, -1).contiguous().transpose(0, -1) for g in plain]
        one, two = (exchange(compressor, inputs).ends[0] for inputs in (plain, strided))
        for a, b in ((one.mean, two.mean), (one.mine.dense(), two.mine.dense())):
            require(close(a, b, 1e-12), f"{compressor}, {shape}: strides change the numbers")


def the_same_again_gives_the_same(compressor: Compressor) -> None:
    """A round is a function of value, state and round, and of nothing else."""
    for case in CASES:
        one, two = ([r.ends for _, r in rounds(compressor, case)] for _ in range(2))
        require(same(one, two), f"{compressor}, {case}: differs when run twice")
        *_, (_, last) = rounds(compressor, case, copies=False)
        equal = same(one[-1], last.ends)
        require(equal, f"{compressor}, {case}: differs where states are passed on")


def inputs_are_not_changed(compressor: Compressor) -> None:
    """Neither the gradient nor the state is changed; only a wire may overwrite an ask's tensor."""
    for case in CASES:
        gradients = case.gradients()
        states = exchange(compressor, case.gradients(1)).states
        before = copy.deepcopy((gradients, states))
        exchange(compressor, gradients, states=states, round=1)
        require(same(before[0], gradients), f"{compressor}, {case}: changes the gradient")
        exchange(compressor, gradients, states=states, round=1, overwrites=True)
        require(same(before[1], states), f"{compressor}, {case}: changes the state")


def state_survives_saving(compressor: Compressor) -> None:
    """State consists of tensors, numbers, text and containers; saving changes no result."""
    for case in CASES:
        states = exchange(compressor, case.gradients()).states
        file = io.BytesIO()
        torch.save(states, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        direct = exchange(compressor, case.gradients(1), states=states, round=1).ends
        restored = exchange(compressor, case.gradients(1), states=loaded, round=1).ends
        require(same(direct, restored), f"{compressor}, {case}: differs after saving and loading")


def all_workers_send_as_much(compressor: Compressor) -> None:
    """Messages of all workers have the same sizes and types, so that no size is sent."""
    for case in CASES:
        for _, one in rounds(compressor, case):
            sizes = [[[(t.shape, t.dtype) for t in tensors(a)] for a in asks] for asks in one.asks]
            require(all(s == sizes[0] for s in sizes), f"{compressor}, {case}: sizes differ")


def lossless_is_the_exact_mean(compressor: Compressor) -> None:
    """LOSSLESS: the exact mean of the values, and ``mine`` is the value itself."""
    if Trait.LOSSLESS in compressor.traits:
        for case in CASES:
            gradients = case.gradients()
            one = exchange(compressor, [g.clone() for g in gradients])
            meant = torch.stack(gradients).double().mean(0)
            label = f"{compressor}, {case}: not the exact mean"
            require(close(one.ends[0].mean, meant, 8 * torch.finfo(case.dtype).eps), label)
            require(torch.equal(one.ends[0].mine.dense(), gradients[0]), label)


def unbiased_is_right_on_average(compressor: Compressor) -> None:
    """UNBIASED: over many rounds, the mean of what was sent is the value."""
    if Trait.UNBIASED in compressor.traits:
        gradient = Case((5, 6), torch.float64, 1).gradients()
        ends = (exchange(compressor, gradient, round=r).ends[0] for r in range(DRAWS))
        draws = torch.stack([end.mine.dense().clone() for end in ends])
        doubt = SIGMAS * draws.std(0) / math.sqrt(DRAWS) + 1e-12
        off = (draws.mean(0) - gradient[0]).abs()
        require(bool((off <= doubt).all()), f"{compressor}: biased by up to {float(off.max()):.3g}")


def contractive_loses_less_than_there_was(compressor: Compressor) -> None:
    """CONTRACTIVE: ||x - mine||^2 <= (1 - delta) ||x||^2 with delta > 0, from a fresh state."""
    if Trait.CONTRACTIVE in compressor.traits:
        for case in CASES:
            for seed in range(3):
                gradients = case.gradients(seed)
                for x, end in zip(gradients, exchange(compressor, gradients).ends, strict=True):
                    meant = float(x.double().square().sum())
                    lost = float((x.double() - end.mine.dense().double()).square().sum())
                    label = f"{compressor}, {case}: lost {lost:.3g} of {meant:.3g}"
                    require(lost <= (1 - 1e-6) * meant, label)


def conserving_loses_nothing_over_time(compressor: Compressor) -> None:
    """CONSERVING: all that was sent, plus the residual (``state[0]``), is the sum of all values.

    With MOMENTUM, velocities are summed, which only the tests of the member itself can check.
    """
    if Trait.CONSERVING in compressor.traits and Trait.MOMENTUM not in compressor.traits:
        for case in CASES:
            sent = meant = torch.zeros(case.shape, dtype=torch.float64)
            for gradients, one in rounds(compressor, case, count=6):
                meant = meant + gradients[0].double()
                sent = sent + one.ends[0].mine.dense().double()
                total = sent + one.ends[0].state[0].double()
                tolerance = 64 * torch.finfo(case.dtype).eps
                require(close(total, meant, tolerance), f"{compressor}, {case}: something is lost")


def one_shot_is_decoded_by_add(compressor: Compressor) -> None:
    """ONE_SHOT: a single ask; ``add`` adds ``weight * mine`` to a tensor."""
    if Trait.ONE_SHOT not in compressor.traits:
        return
    add = compressor.add
    if add is None:
        raise AssertionError(f"{compressor}: ONE_SHOT, but has no add() to decode its message")
    for case in CASES:
        one = exchange(compressor, case.gradients())
        for asks, end in zip(one.asks, one.ends, strict=True):
            require(len(asks) == 1, f"{compressor}, {case}: {len(asks)} asks, not one")
            into = torch.ones_like(end.mine.dense())
            add(tensors(asks[0]), into, 0.5)
            decoded = close(into, 1 + 0.5 * end.mine.dense(), 4 * torch.finfo(case.dtype).eps)
            require(decoded, f"{compressor}, {case}: add() does not give what was sent")


def sums_asks_for_means_only(compressor: Compressor) -> None:
    """SUMS: any all-reduce can carry it. A compressor that gathers must not claim it."""
    asks = (a for case in CASES for a in exchange(compressor, case.gradients()).asks)
    kinds = {type(ask) for own in asks for ask in own}
    if Trait.SUMS in compressor.traits:
        require(kinds <= {Mean}, f"{compressor}: SUMS, but asks {kinds}")
    require(kinds <= {Mean, Gather, Fold}, f"{compressor}: asks {kinds}")


def elementwise_takes_a_bucket_as_one(compressor: Compressor) -> None:
    """ELEMENTWISE: a bucket sends the same bits as its tensors, and remembers nothing."""
    if Trait.ELEMENTWISE not in compressor.traits:
        return
    for dtype in (torch.float64, torch.float32):
        gradients = Case((23,), dtype, 3).gradients()
        require(starts(compressor, gradients) == [None] * 3, f"{compressor}: a bucket remembers")
        bucket = exchange(compressor, [g.clone() for g in gradients])
        whole = bucket.ends[0]
        cuts = [slice(0, 1), slice(1, 9), slice(9, 9), slice(9, 23)]
        pieces = [exchange(compressor, [g[c].clone() for g in gradients]).ends[0] for c in cuts]
        label = f"{compressor}: a bucket differs from its tensors"
        if Trait.LOSSLESS not in compressor.traits:
            sent = torch.cat([piece.mine.dense() for piece in pieces])
            require(torch.equal(whole.mine.dense(), sent), label)
        require(close(whole.mean, torch.cat([p.mean for p in pieces]), bucket.tolerance), label)
        require(whole.state is None, f"{compressor}: a bucket remembers")


def sliceable_acts_on_any_piece(compressor: Compressor) -> None:
    """SLICEABLE: a flat slice of a tensor is a legal value, and the mean law holds."""
    if Trait.SLICEABLE not in compressor.traits:
        return
    gradients = [g.flatten() for g in Case((9, 8), torch.float64, 3).gradients()]
    for start, stop in ((0, 1), (3, 40), (40, 72), (72, 72)):
        one = exchange(compressor, [g[start:stop] for g in gradients])
        sent = torch.stack([end.mine.dense() for end in one.ends]).mean(0)
        label = f"{compressor}, slice {start}:{stop}"
        require(sent.shape == (stop - start,), f"{label}: comes out as {tuple(sent.shape)}")
        if Trait.MERGES not in compressor.traits:
            require(close(one.ends[0].mean, sent, one.tolerance), f"{label}: not the mean")


def tracks_comes_ever_closer(compressor: Compressor) -> None:
    """TRACKS: if a value stays the same, ``mine`` and the mean converge to it."""
    if Trait.TRACKS not in compressor.traits:
        return
    values = Case((5, 6), torch.float64, 3).gradients()
    states = starts(compressor, values)
    for round in range(40):
        one = exchange(compressor, [v.clone() for v in values], states=states, round=round)
        states = one.states
    right = all(close(e.mine.dense(), v, 1e-6) for e, v in zip(one.ends, values, strict=True))
    mean = close(one.ends[0].mean, torch.stack(values).mean(0), 1e-6)
    require(right and mean, f"{compressor}: does not converge to the value")


def unscaled_ignores_the_length(compressor: Compressor) -> None:
    """UNSCALED: a gradient a thousand times as long has the same result."""
    if Trait.UNSCALED in compressor.traits:
        for case in CASES:
            long = [g * 1000 for g in case.gradients()]
            one, two = (exchange(compressor, inputs).ends[0] for inputs in (case.gradients(), long))
            equal = torch.equal(one.mean, two.mean)
            require(equal, f"{compressor}, {case}: the result depends on the length")


def momentum_outlasts_the_gradient(compressor: Compressor) -> None:
    """MOMENTUM: a gradient is still sent in rounds after the gradient has become zero."""
    if Trait.MOMENTUM not in compressor.traits:
        return
    values = Case((5, 6), torch.float64, 2).gradients()
    one = exchange(compressor, values)
    again = exchange(compressor, [torch.zeros_like(v) for v in values], states=one.states, round=1)
    require(bool(again.ends[0].mean.any()), f"{compressor}: does not remember the gradient before")


LAWS = (
    mean_of_what_was_sent_is_the_mean, own_message_survives_an_overwriting_wire,
    what_was_sent_can_be_subtracted, all_workers_end_with_the_same_bits,
    what_comes_out_looks_like_what_went_in, strides_do_not_matter, the_same_again_gives_the_same,
    inputs_are_not_changed, state_survives_saving, all_workers_send_as_much,
    lossless_is_the_exact_mean, unbiased_is_right_on_average, contractive_loses_less_than_there_was,
    conserving_loses_nothing_over_time, one_shot_is_decoded_by_add, sums_asks_for_means_only,
    elementwise_takes_a_bucket_as_one, sliceable_acts_on_any_piece, tracks_comes_ever_closer,
    unscaled_ignores_the_length, momentum_outlasts_the_gradient,
)  # fmt: skip
