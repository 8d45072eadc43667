"""Laws of compressors. Some hold for all compressors, others for compressors with a trait."""

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
"""A mean of DRAWS draws may be off by this many standard errors. 1 in 10^11 is off by more."""


def mean_of_what_was_sent_is_the_mean(compressor: Compressor) -> None:
    """``mean`` is the average of ``mine`` over the workers. MERGES is not checked."""
    if Trait.MERGES in compressor.traits:
        return
    for case in CASES:
        for number, (_, one) in enumerate(rounds(compressor, case)):
            if Trait.LOSSLESS in compressor.traits and number % 2:
                continue  # the wire overwrites in odd rounds, and a lossless ``mine`` needs no copy
            sent = torch.stack([end.mine.dense() for end in one.ends]).double().mean(0)
            label = f"{compressor}, {case}, round {number}: mean is not the mean of what was sent"
            require(close(one.ends[0].mean, sent, one.tolerance), label)


def own_message_survives_an_overwriting_wire(compressor: Compressor) -> None:
    """If a wire overwrites the tensor of an ask, ``mine`` and the state must not change."""
    if Trait.LOSSLESS in compressor.traits:
        return  # nothing is subtracted from the value later, so ``mine`` needs no copy
    for case in CASES:
        results = []
        for overwrites in (False, True):
            ends = exchange(compressor, case.gradients(), overwrites=overwrites).ends
            results.append([(end.mine.dense(), end.state) for end in ends])
        label = f"{compressor}, {case}: mine or the state changes if the wire overwrites an ask"
        require(same(*results), label)


def what_was_sent_can_be_subtracted(compressor: Compressor) -> None:
    """``mine.subtract_from(x)`` subtracts ``mine.dense()`` from x in place.

    CONTRACTIVE: x may be the sent value itself, as in error feedback, so ``mine`` must not share
    memory with the value.
    """
    for case in CASES:
        gradients = case.gradients()
        ends = exchange(compressor, gradients).ends
        sent = [end.mine.dense().clone() for end in ends]
        for end, dense, x in zip(ends, sent, case.gradients(1), strict=True):
            expected = x - dense
            end.mine.subtract_from(x)
            right = close(x, expected, 8 * torch.finfo(case.dtype).eps)
            require(right, f"{compressor}, {case}: subtract_from does not subtract what was sent")
        if Trait.CONTRACTIVE in compressor.traits:
            for gradient in gradients:
                gradient.zero_()
            apart = same([end.mine.dense() for end in ends], sent)
            require(apart, f"{compressor}, {case}: mine shares memory with the value")


def all_workers_end_with_the_same_bits(compressor: Compressor) -> None:
    """``mean`` has the same bits on all workers, so that replicas do not diverge."""
    for case in CASES:
        for _, one in rounds(compressor, case):
            agreed = all(torch.equal(end.mean, one.ends[0].mean) for end in one.ends)
            require(agreed, f"{compressor}, {case}: the workers have different means")


def what_comes_out_looks_like_what_went_in(compressor: Compressor) -> None:
    """The result is finite, has the value's shape and dtype, and is zero if the value is zero."""
    for case in CASES:
        nothing = [torch.zeros_like(g) for g in case.gradients()]
        quiet = exchange(compressor, nothing)
        label = f"{compressor}, {case}"
        require(not any(end.mean.any() for end in quiet.ends), f"{label}: zeros do not stay zeros")
        one = exchange(compressor, case.gradients(), states=quiet.states, round=1)
        for end in one.ends:
            for out in (end.mean, end.mine.dense()):
                require(out.shape == case.shape, f"{label}: the shape is {tuple(out.shape)}")
                require(out.dtype == case.dtype, f"{label}: the result has dtype {out.dtype}")
                require(bool(out.isfinite().all()), f"{label}: the result is not finite")


def strides_do_not_matter(compressor: Compressor) -> None:
    """The result for a transposed view is the same as for a contiguous tensor."""
    for shape in ((5, 6), (4, 3, 2, 2)):
        plain = Case(shape, torch.float64, 2).gradients()
        strided = [g.transpose(0, -1).contiguous().transpose(0, -1) for g in plain]
        one, two = (exchange(compressor, inputs).ends[0] for inputs in (plain, strided))
        for a, b in ((one.mean, two.mean), (one.mine.dense(), two.mine.dense())):
            require(close(a, b, 1e-12), f"{compressor}, {shape}: the result depends on strides")


def the_same_again_gives_the_same(compressor: Compressor) -> None:
    """The result of a round depends only on the value, the state and the round number."""
    for case in CASES:
        one, two = ([r.ends for _, r in rounds(compressor, case)] for _ in range(2))
        require(same(one, two), f"{compressor}, {case}: two equal runs have different results")
        *_, (_, last) = rounds(compressor, case, copies=False)
        equal = same(one[-1], last.ends)
        require(equal, f"{compressor}, {case}: the result differs if states are not copied")


def inputs_are_not_changed(compressor: Compressor) -> None:
    """A flow changes neither the gradient nor the state. Only the wire may overwrite tensors."""
    for case in CASES:
        gradients = case.gradients()
        states = exchange(compressor, case.gradients(1)).states
        before = copy.deepcopy((gradients, states))
        exchange(compressor, gradients, states=states, round=1)
        require(same(before[0], gradients), f"{compressor}, {case}: the flow changes the gradient")
        exchange(compressor, gradients, states=states, round=1, overwrites=True)
        require(same(before[1], states), f"{compressor}, {case}: the flow changes the state")


def state_survives_saving(compressor: Compressor) -> None:
    """``torch.load(weights_only=True)`` can read a saved state, and the results stay the same."""
    for case in CASES:
        states = exchange(compressor, case.gradients()).states
        file = io.BytesIO()
        torch.save(states, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        direct = exchange(compressor, case.gradients(1), states=states, round=1).ends
        restored = exchange(compressor, case.gradients(1), states=loaded, round=1).ends
        require(same(direct, restored), f"{compressor}, {case}: saving changes the result")


def all_workers_send_as_much(compressor: Compressor) -> None:
    """All workers' messages have equal shapes and dtypes, so shapes and dtypes are not sent."""
    for case in CASES:
        for _, one in rounds(compressor, case):
            sizes = [[[(t.shape, t.dtype) for t in tensors(a)] for a in asks] for asks in one.asks]
            equal = all(size == sizes[0] for size in sizes)
            require(equal, f"{compressor}, {case}: shapes or dtypes of the messages differ")


def lossless_is_the_exact_mean(compressor: Compressor) -> None:
    """LOSSLESS: ``mean`` is the mean of the values up to rounding, and ``mine`` is the value."""
    if Trait.LOSSLESS in compressor.traits:
        for case in CASES:
            gradients = case.gradients()
            one = exchange(compressor, [g.clone() for g in gradients])
            meant = torch.stack(gradients).double().mean(0)
            label = f"{compressor}, {case}: LOSSLESS, but the result is not the exact mean"
            require(close(one.ends[0].mean, meant, 8 * torch.finfo(case.dtype).eps), label)
            require(torch.equal(one.ends[0].mine.dense(), gradients[0]), label)


def unbiased_is_right_on_average(compressor: Compressor) -> None:
    """UNBIASED: averaged over many rounds, what was sent is the value."""
    if Trait.UNBIASED in compressor.traits:
        gradient = Case((5, 6), torch.float64, 1).gradients()
        ends = (exchange(compressor, gradient, round=r).ends[0] for r in range(DRAWS))
        draws = torch.stack([end.mine.dense().clone() for end in ends])
        tolerance = SIGMAS * draws.std(0) / math.sqrt(DRAWS) + 1e-12
        bias = (draws.mean(0) - gradient[0]).abs()
        label = f"{compressor}: UNBIASED, but its bias is up to {float(bias.max()):.3g}"
        require(bool((bias <= tolerance).all()), label)


def contractive_loses_less_than_there_was(compressor: Compressor) -> None:
    """CONTRACTIVE: ||x - mine||^2 <= (1 - delta) ||x||^2 with a delta > 0, in the first round."""
    if Trait.CONTRACTIVE in compressor.traits:
        for case in CASES:
            for seed in range(3):
                gradients = case.gradients(seed)
                for x, end in zip(gradients, exchange(compressor, gradients).ends, strict=True):
                    meant = float(x.double().square().sum())
                    lost = float((x.double() - end.mine.dense().double()).square().sum())
                    label = f"{compressor}, {case}: squared error {lost:.3g} of a value {meant:.3g}"
                    require(lost <= (1 - 1e-6) * meant, label)


def conserving_loses_nothing_over_time(compressor: Compressor) -> None:
    """CONSERVING: all that was sent, plus the residual (``state[0]``), is the sum of all values.

    A compressor with MOMENTUM is not checked, because it sums momentum, not the values.
    """
    if Trait.CONSERVING in compressor.traits and Trait.MOMENTUM not in compressor.traits:
        for case in CASES:
            sent = meant = torch.zeros(case.shape, dtype=torch.float64)
            for gradients, one in rounds(compressor, case, count=6):
                meant = meant + gradients[0].double()
                sent = sent + one.ends[0].mine.dense().double()
                total = sent + one.ends[0].state[0].double()
                tolerance = 64 * torch.finfo(case.dtype).eps
                require(close(total, meant, tolerance), f"{compressor}, {case}: it loses something")


def one_shot_is_decoded_by_add(compressor: Compressor) -> None:
    """ONE_SHOT: a flow has a single ask, and ``add`` of its message adds ``weight * mine``."""
    if Trait.ONE_SHOT not in compressor.traits:
        return
    add = compressor.add
    if add is None:
        raise AssertionError(f"{compressor}: ONE_SHOT, but it has no add() to decode messages with")
    for case in CASES:
        one = exchange(compressor, case.gradients())
        for asks, end in zip(one.asks, one.ends, strict=True):
            require(len(asks) == 1, f"{compressor}, {case}: ONE_SHOT, but it has {len(asks)} asks")
            into = torch.ones_like(end.mine.dense())
            add(tensors(asks[0]), into, 0.5)
            decoded = close(into, 1 + 0.5 * end.mine.dense(), 4 * torch.finfo(case.dtype).eps)
            require(decoded, f"{compressor}, {case}: add() does not add what was sent")


def sums_asks_for_means_only(compressor: Compressor) -> None:
    """SUMS: a flow asks only for Mean. Without SUMS it may also ask for Gather and Fold."""
    asks = (a for case in CASES for a in exchange(compressor, case.gradients()).asks)
    kinds = {type(ask) for own in asks for ask in own}
    if Trait.SUMS in compressor.traits:
        require(kinds <= {Mean}, f"{compressor}: SUMS, but it asks for {kinds}")
    require(kinds <= {Mean, Gather, Fold}, f"{compressor}: it asks for {kinds}")


def elementwise_takes_a_bucket_as_one(compressor: Compressor) -> None:
    """ELEMENTWISE: a bucket gives the same result as its tensors one by one. State is None."""
    if Trait.ELEMENTWISE not in compressor.traits:
        return
    for dtype in (torch.float64, torch.float32):
        gradients = Case((23,), dtype, 3).gradients()
        require(starts(compressor, gradients) == [None] * 3, f"{compressor}: its state is not None")
        bucket = exchange(compressor, [g.clone() for g in gradients])
        whole = bucket.ends[0]
        cuts = [slice(0, 1), slice(1, 9), slice(9, 9), slice(9, 23)]
        pieces = [exchange(compressor, [g[c].clone() for g in gradients]).ends[0] for c in cuts]
        label = f"{compressor}: ELEMENTWISE, but a bucket has another result than its tensors"
        if Trait.LOSSLESS not in compressor.traits:
            sent = torch.cat([piece.mine.dense() for piece in pieces])
            require(torch.equal(whole.mine.dense(), sent), label)
        require(close(whole.mean, torch.cat([p.mean for p in pieces]), bucket.tolerance), label)
        require(whole.state is None, f"{compressor}: its state is not None")


def sliceable_acts_on_any_piece(compressor: Compressor) -> None:
    """SLICEABLE: a flat slice may be a value. Without MERGES, mean is the mean of what was sent."""
    if Trait.SLICEABLE not in compressor.traits:
        return
    gradients = [g.flatten() for g in Case((9, 8), torch.float64, 3).gradients()]
    for start, stop in ((0, 1), (3, 40), (40, 72), (72, 72)):
        one = exchange(compressor, [g[start:stop] for g in gradients])
        sent = torch.stack([end.mine.dense() for end in one.ends]).mean(0)
        label = f"{compressor}, slice {start}:{stop}"
        require(sent.shape == (stop - start,), f"{label}: the result has shape {tuple(sent.shape)}")
        if Trait.MERGES not in compressor.traits:
            require(close(one.ends[0].mean, sent, one.tolerance), f"{label}: not the mean")


def tracks_comes_ever_closer(compressor: Compressor) -> None:
    """TRACKS: for constant values, ``mine`` converges to the value, and ``mean`` to their mean."""
    if Trait.TRACKS not in compressor.traits:
        return
    values = Case((5, 6), torch.float64, 3).gradients()
    states = starts(compressor, values)
    for round in range(40):
        one = exchange(compressor, [v.clone() for v in values], states=states, round=round)
        states = one.states
    right = all(close(e.mine.dense(), v, 1e-6) for e, v in zip(one.ends, values, strict=True))
    mean = close(one.ends[0].mean, torch.stack(values).mean(0), 1e-6)
    require(right and mean, f"{compressor}: TRACKS, but it does not converge in 40 rounds")


def unscaled_ignores_the_length(compressor: Compressor) -> None:
    """UNSCALED: the result stays the same if all gradients are multiplied by 1000."""
    if Trait.UNSCALED in compressor.traits:
        for case in CASES:
            long = [g * 1000 for g in case.gradients()]
            one, two = (exchange(compressor, inputs).ends[0] for inputs in (case.gradients(), long))
            equal = torch.equal(one.mean, two.mean)
            require(equal, f"{compressor}, {case}: UNSCALED, but the result depends on the norm")


def momentum_outlasts_the_gradient(compressor: Compressor) -> None:
    """MOMENTUM: after a round, the result is still not zero in a round with zero gradients."""
    if Trait.MOMENTUM not in compressor.traits:
        return
    values = Case((5, 6), torch.float64, 2).gradients()
    one = exchange(compressor, values)
    again = exchange(compressor, [torch.zeros_like(v) for v in values], states=one.states, round=1)
    require(bool(again.ends[0].mean.any()), f"{compressor}: it forgets the previous gradient")


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
