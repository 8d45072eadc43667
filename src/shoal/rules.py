"""Rules: which techniques cannot be combined, why, and what to do instead.

Rules decide on declared facts (traits, degrees, staleness), never on names: n techniques need n
declarations, not n² checks. The table in the docs and the error messages come from the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal.axes.collectives import Collective
from shoal.axes.compression import Compressor, Trait
from shoal.axes.coordination import Coordination
from shoal.axes.partition import Partition
from shoal.axes.scheduling import Schedule
from shoal.axes.synchrony import Synchrony
from shoal.errors import Conflict


@dataclass(frozen=True)  # of a Protocol: its attributes are read-only, as those of Strategy
class Techniques(Protocol):
    """One technique per axis: what rules see of a ``Strategy``."""

    partition: Partition
    coordination: Coordination
    synchrony: Synchrony
    scheduling: Schedule
    compression: Compressor
    collectives: Collective


Rule = Callable[[Techniques], Iterator[Conflict]]


class Facts(NamedTuple):
    """What is known once workers, model and optimizer exist."""

    ranks: int
    clips: bool = False
    skips: bool = False  # a step with inf or NaN is skipped
    closure: bool = False  # the optimizer needs a closure (LBFGS)
    models: int = 1
    momentum: bool = False  # the optimizer has momentum


def can_overlap(s: Techniques) -> bool:
    """Return whether whole replicas send gradients, so that backward hooks can send them early."""
    return not s.partition.cuts and sends_gradients(s)


def sends_gradients(s: Techniques) -> bool:
    """Return whether in every step all workers agree on the gradient."""
    every = s.synchrony.period == 1 and s.synchrony.waits
    return every and s.coordination.sends == "gradient"


def conflicts(s: Techniques) -> list[Conflict]:
    """Return all conflicts of a strategy."""
    return [conflict for rule in RULES for conflict in rule(s)]


def _collective_waits(s: Techniques) -> Iterator[Conflict]:
    if s.coordination.via == "collective" and not s.synchrony.waits:
        yield Conflict(
            f"{s.coordination} x {s.synchrony}",
            "a collective ends only when every worker has entered it",
            "parameter_server with ssp or asp, gossip with asp, or local(h)",
        )


def _peers_have_no_clock(s: Techniques) -> Iterator[Conflict]:
    bounded = not s.synchrony.waits and not s.synchrony.free
    if s.coordination.via == "peers" and bounded:
        yield Conflict(
            f"{s.coordination} x {s.synchrony}",
            "no peer knows the clock of the slowest worker",
            "bsp or asp, or parameter_server",
        )


def _gossip_is_exact(s: Techniques) -> Iterator[Conflict]:
    if s.coordination.sends != "parameter" or Trait.LOSSLESS in s.compression.traits:
        return
    if Trait.TRACKS not in s.compression.traits:
        yield Conflict(
            f"{s.coordination} x {s.compression}",
            "loss would damage the model itself, not an update of it",
            "exact, or difference(topk(0.1))",
        )
    elif not s.synchrony.waits:
        yield Conflict(
            f"{s.coordination}, {s.synchrony} x {s.compression}",
            "a random peer holds no public copy to which a difference could be added",
            "bsp or local(h), or exact",
        )


def _factors_are_of_gradients(s: Techniques) -> Iterator[Conflict]:
    if Trait.FACTORS in s.compression.traits and not can_overlap(s):
        yield Conflict(
            f"{s.compression} x {s.partition}, {s.coordination}, {s.synchrony}",
            "only the gradient of an uncut linear layer has factors",
            "data with all_reduce and bsp, or exact",
        )


def _nothing_to_overlap(s: Techniques) -> Iterator[Conflict]:
    if not (s.scheduling.overlaps or s.scheduling.early) or can_overlap(s):
        return
    if s.partition.cuts:
        why = "inside a cut replica torch orders the messages; replicas agree after backward"
    elif s.synchrony.period > 1:
        why = "the exchange follows the step: there is no backward to overlap"
    elif s.coordination.sends == "delta":
        why = "the change of a whole step is sent, which is known only after the step"
    elif s.coordination.sends == "parameter":
        why = "parameters are sent, and this starts with the step already"
    else:
        why = "a worker pushes once, after backward"
    yield Conflict(f"{s.scheduling} x {s.coordination}, {s.synchrony}", why, "fifo")


def _slices_need_sliceable(s: Techniques) -> Iterator[Conflict]:
    if Trait.SLICEABLE in s.compression.traits:
        return
    if s.scheduling.slices:
        yield Conflict(
            f"{s.compression} x {s.scheduling}",
            "it needs whole matrices, and slices cut them",
            "wfbp or fifo; or topk, cast",
        )
    if s.partition.shard > 1:
        yield Conflict(
            f"{s.compression} x shard({s.partition.shard})",
            "it needs whole matrices, and shards are pieces of them",
            "topk or cast; or tensor, pipe or data instead of shard",
        )


def _a_change_has_a_size(s: Techniques) -> Iterator[Conflict]:
    changes = s.synchrony.period > 1 or s.coordination.sends == "delta"
    if Trait.UNSCALED in s.compression.traits and changes:
        yield Conflict(
            f"{s.compression} x {s.coordination}, {s.synchrony}",
            "every change of the model would become plus or minus one, whatever its size",
            "all_reduce with bsp, or error_feedback(topk(0.01))",
        )


def _one_message_a_push(s: Techniques) -> Iterator[Conflict]:
    pushes = s.coordination.via == "server" and not s.synchrony.waits
    if pushes and Trait.ONE_SHOT not in s.compression.traits:
        yield Conflict(
            f"{s.compression} x {s.coordination}, {s.synchrony}",
            "a push is a single message, and this compressor needs several",
            "a compressor of one ask, such as topk or cast",
        )


def _merging_needs_a_tree(s: Techniques) -> Iterator[Conflict]:
    merges = Trait.MERGES in s.compression.traits and Trait.ONE_SHOT not in s.compression.traits
    if merges and s.coordination.via != "collective":
        yield Conflict(
            f"{s.compression} x {s.coordination}",
            "its messages are merged in pairs, along a tree of workers",
            "all_reduce, or error_feedback(topk(0.01))",
        )


def _route_without_effect(s: Techniques) -> Iterator[Conflict]:
    queued = s.scheduling.queues  # at the hops of a route, native's tree included
    if s.collectives.is_native and not queued:
        return
    what, plain = (s.scheduling, "priority, native") if queued else (s.collectives, "native")
    if s.coordination.via != "collective":
        why, instead = "no collective runs, so a route and its hops have no effect", plain
    elif Trait.SUMS not in s.compression.traits:
        why = "a route sums messages, and this compressor gathers them"
        instead = f"{plain}, or cast"
    else:
        return
    yield Conflict(f"{what} x {s.coordination}, {s.compression}", why, instead)


def _route_serves_the_replicas_named(s: Techniques) -> Iterator[Conflict]:
    if s.partition.data is not None:
        yield from _route_serves(s, s.partition.data)


def _route_serves(s: Techniques, workers: int) -> Iterator[Conflict]:
    if s.coordination.via == "collective" and (why := s.collectives.refusal(workers)):
        instead = "ring or butterfly, which serve any number; or other groups"
        yield Conflict(f"{s.collectives} x {workers} workers", why, instead)


def _only_sums_are_scattered(s: Techniques) -> Iterator[Conflict]:
    if not s.scheduling.scatters:
        return
    if s.coordination.via != "collective":
        why = "reduce-scatter and all-gather need a collective of all workers"
        instead = "all_reduce, or fifo"
    elif not s.collectives.is_native:
        why, instead = "a route has no reduce-scatter and all-gather of its own", "native"
    elif Trait.SUMS not in s.compression.traits or Trait.ELEMENTWISE not in s.compression.traits:
        why, instead = "only elementwise sums can be scattered", "exact or cast"
    else:
        return
    yield Conflict(f"{s.scheduling} x {s.coordination}, {s.compression}", why, instead)


def _cut_replicas_use_collectives(s: Techniques) -> Iterator[Conflict]:
    if s.partition.cuts and s.coordination.via != "collective":
        yield Conflict(
            f"{s.partition} x {s.coordination}",
            "a replica of several ranks cannot speak to servers or peers as one worker",
            "all_reduce, with bsp or local(h)",
        )


def _alone_there_is_nothing_to_agree(s: Techniques) -> Iterator[Conflict]:
    if s.partition.data == 1:
        yield from _no_peer(s)


def _no_peer(s: Techniques) -> Iterator[Conflict]:
    """Refuse techniques that have no effect, or only lose precision, if there is one replica."""
    plain = sends_gradients(s) and s.coordination.via == "collective"
    if not (plain and Trait.LOSSLESS in s.compression.traits and s.collectives.is_native):
        yield Conflict(
            f"{s.partition} x {s.coordination}, {s.synchrony}, {s.compression}, {s.collectives}",
            "one replica has no peer to agree with",
            "data(2) or more, or leave the other techniques out",
        )


RULES: tuple[Rule, ...] = (
    _collective_waits, _peers_have_no_clock, _gossip_is_exact, _factors_are_of_gradients,
    _nothing_to_overlap, _slices_need_sliceable, _a_change_has_a_size, _one_message_a_push,
    _merging_needs_a_tree, _route_without_effect, _only_sums_are_scattered,
    _route_serves_the_replicas_named, _cut_replicas_use_collectives,
    _alone_there_is_nothing_to_agree,
)  # fmt: skip


def _with_closure(facts: Facts) -> Iterator[Conflict]:
    if facts.closure and facts.clips:
        why = "the optimizer uses each gradient before it could be clipped"
        yield Conflict("closure x clip", why, "no clip, or update without a closure")
    if facts.closure and facts.skips:
        why = "the optimizer updates the model before the step could be skipped"
        instead = "nonfinite='stop', or update without a closure"
        yield Conflict("closure x nonfinite='skip'", why, instead)


def bound_conflicts(s: Techniques, facts: Facts) -> list[Conflict]:
    """Return the conflicts that depend on workers, model and optimizer."""
    conflicts = [*_with_closure(facts)]
    if s.partition.cuts and s.partition.data is None and facts.ranks == s.partition.ranks:
        conflicts += _no_peer(s)
    if s.partition.data is None:
        conflicts += _route_serves(s, s.partition.replicas(facts.ranks))
    if s.scheduling.early and facts.clips:
        why = "the next forward starts before all gradients arrive, and the norm needs all of them"
        conflicts.append(Conflict(f"{s.scheduling} x clip", why, "wfbp, or no clipping"))
    if s.scheduling.early and facts.skips:
        why = "a step can be skipped only before any of its updates ran"
        conflicts.append(Conflict(f"{s.scheduling} x nonfinite='skip'", why, "wfbp, or 'stop'"))
    if facts.momentum and Trait.MOMENTUM in s.compression.traits:
        why = "it applies momentum itself, and the optimizer would apply it once more"
        conflicts.append(Conflict(f"{s.compression} x momentum", why, "SGD(momentum=0), not Adam"))
    if facts.closure and not (sends_gradients(s) and Trait.LOSSLESS in s.compression.traits):
        why = "a closure runs several times per step and needs exact gradients each time"
        what = f"closure x {s.coordination}, {s.synchrony}, {s.compression}"
        conflicts.append(Conflict(what, why, "exact with all_reduce and bsp"))
    if facts.closure and (s.scheduling.early or s.partition.cuts):
        why = "the whole update runs inside the optimizer's own step"
        what = f"closure x {s.partition}, {s.scheduling}"
        conflicts.append(Conflict(what, why, "data with wfbp"))
    if facts.models > 1 and (s.partition.cuts or s.coordination.via == "server"):
        why = "several models are updated by the user's own loop"
        what = f"{facts.models} models x {s.partition}, {s.coordination}"
        conflicts.append(Conflict(what, why, "data with all_reduce or gossip"))
    return conflicts


def advice(s: Techniques) -> tuple[str, ...]:
    """Return what is legal but unwise: logged and shown, never raised."""
    texts, traits = [], s.compression.traits
    fine = Trait.CONSERVING | Trait.ELEMENTWISE | Trait.UNBIASED
    if Trait.CONTRACTIVE in traits and not traits & fine:
        better = f"error_feedback({s.compression}) converges better"
        texts.append(f"{s.compression} forgets what it does not send: {better}")
    if Trait.MOMENTUM in traits:
        texts.append(f"{s.compression} applies momentum itself: use SGD(momentum=0), not Adam")
    if s.synchrony.free:
        texts.append("asp does not bound staleness: lower the learning rate, or use ssp(3)")
    if s.coordination.outer is not None and s.synchrony.period == 1:
        pair = f"{s.coordination} with {s.synchrony}"
        texts.append(f"{pair}: a block has one step only; try local(8)")
    if s.synchrony.period > 64:
        texts.append(f"{s.synchrony}: replicas diverge over so many steps; try local(16)")
    if not s.scheduling.overlaps and can_overlap(s):
        texts.append(f"{s.scheduling} leaves the link idle during backward: wfbp overlaps them")
    return tuple(texts)
