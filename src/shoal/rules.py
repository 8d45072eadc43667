"""Rules that say which techniques cannot be combined, why, and what to do instead.

A rule reads the declared properties of techniques (traits, degrees, staleness), never their names,
so a new technique needs no new rule. The table in the docs is generated from these rules.
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


@dataclass(frozen=True)  # makes the attributes of the protocol read-only, like those of Strategy
class Techniques(Protocol):
    """The attributes of a ``Strategy`` that rules read: one technique per axis."""

    partition: Partition
    coordination: Coordination
    synchrony: Synchrony
    scheduling: Schedule
    compression: Compressor
    collectives: Collective


Rule = Callable[[Techniques], Iterator[Conflict]]


class Facts(NamedTuple):
    """What is known when the workers have started and the model and the optimizer exist."""

    ranks: int  # number of ranks
    clips: bool = False  # whether the norm of the gradient is clipped
    skips: bool = False  # whether a step with inf or NaN is skipped
    closure: bool = False  # whether the optimizer needs a closure, as LBFGS does
    models: int = 1  # number of models
    momentum: bool = False  # whether the optimizer has momentum


def can_overlap(s: Techniques) -> bool:
    """Return whether gradients can be sent in backward.

    They can if no replica is cut, and all workers average their gradients in every step.
    """
    return not s.partition.cuts and sends_gradients(s)


def sends_gradients(s: Techniques) -> bool:
    """Return whether all workers average their gradients in every step."""
    every = s.synchrony.period == 1 and s.synchrony.waits
    return every and s.coordination.sends == "gradient"


def conflicts(s: Techniques) -> list[Conflict]:
    """Return all conflicts between the techniques of a strategy."""
    return [conflict for rule in RULES for conflict in rule(s)]


def _collective_waits(s: Techniques) -> Iterator[Conflict]:
    if s.coordination.via == "collective" and not s.synchrony.waits:
        yield Conflict(
            f"{s.coordination} x {s.synchrony}",
            "a collective ends only when every worker has entered it",
            "use parameter_server with ssp or asp, gossip with asp, or local(h)",
        )


def _peers_have_no_clock(s: Techniques) -> Iterator[Conflict]:
    bounded = not s.synchrony.waits and not s.synchrony.free
    if s.coordination.via == "peers" and bounded:
        yield Conflict(
            f"{s.coordination} x {s.synchrony}",
            "no peer knows the clock of the slowest worker, so it cannot wait for it",
            "use bsp, asp or parameter_server",
        )


def _gossip_is_exact(s: Techniques) -> Iterator[Conflict]:
    if s.coordination.sends != "parameter" or Trait.LOSSLESS in s.compression.traits:
        return
    if Trait.TRACKS not in s.compression.traits:
        yield Conflict(
            f"{s.coordination} x {s.compression}",
            "models are sent, and lossy compression would damage the model itself",
            "use exact, or difference(topk(0.1))",
        )
    elif not s.synchrony.waits:
        yield Conflict(
            f"{s.coordination}, {s.synchrony} x {s.compression}",
            "a random peer has no copy of this worker's model to which it could add a difference",
            "use bsp or local(h), or use exact",
        )


def _factors_are_of_gradients(s: Techniques) -> Iterator[Conflict]:
    if Trait.FACTORS in s.compression.traits and not can_overlap(s):
        yield Conflict(
            f"{s.compression} x {s.partition}, {s.coordination}, {s.synchrony}",
            "only the gradient of an uncut linear layer has factors, and no such gradient is sent",
            "use data with all_reduce and bsp, or use exact",
        )


def _nothing_to_overlap(s: Techniques) -> Iterator[Conflict]:
    if not (s.scheduling.overlaps or s.scheduling.early) or can_overlap(s):
        return
    if s.partition.cuts:
        why = "torch orders the messages of a cut replica; replicas are averaged after backward"
    elif s.synchrony.period > 1:
        why = "messages are sent after the optimizer step, so there is no backward to overlap"
    elif s.coordination.sends == "delta":
        why = "the change of a whole step is sent, which is known only after the step"
    elif s.coordination.sends == "parameter":
        why = "parameters are sent, and they are sent from the start of the step in any case"
    else:
        why = "a worker pushes once, after backward"
    yield Conflict(f"{s.scheduling} x {s.coordination}, {s.synchrony}", why, "use fifo")


def _slices_need_sliceable(s: Techniques) -> Iterator[Conflict]:
    if Trait.SLICEABLE in s.compression.traits:
        return
    if s.scheduling.slices:
        yield Conflict(
            f"{s.compression} x {s.scheduling}",
            "this compressor needs whole matrices, and this schedule cuts them into slices",
            "use wfbp or fifo, or a compressor such as topk or cast",
        )
    if s.partition.shard > 1:
        yield Conflict(
            f"{s.compression} x shard({s.partition.shard})",
            "this compressor needs whole matrices, and each rank has only a shard of them",
            "use a compressor such as topk or cast, or use tensor, pipe or data",
        )


def _changes_need_a_scale(s: Techniques) -> Iterator[Conflict]:
    changes = s.synchrony.period > 1 or s.coordination.sends == "delta"
    if Trait.UNSCALED in s.compression.traits and changes:
        yield Conflict(
            f"{s.compression} x {s.coordination}, {s.synchrony}",
            "this compressor would turn every change of a parameter into plus or minus one",
            "use all_reduce with bsp, or error_feedback(topk(0.01))",
        )


def _one_message_a_push(s: Techniques) -> Iterator[Conflict]:
    pushes = s.coordination.via == "server" and not s.synchrony.waits
    if pushes and Trait.ONE_SHOT not in s.compression.traits:
        yield Conflict(
            f"{s.compression} x {s.coordination}, {s.synchrony}",
            "a push is a single message, and this compressor needs several",
            "use a compressor that needs one message, such as topk or cast",
        )


def _merging_needs_a_tree(s: Techniques) -> Iterator[Conflict]:
    merges = Trait.MERGES in s.compression.traits and Trait.ONE_SHOT not in s.compression.traits
    if merges and s.coordination.via != "collective":
        yield Conflict(
            f"{s.compression} x {s.coordination}",
            "the messages of this compressor are merged in pairs, along a tree of all workers",
            "use all_reduce, or error_feedback(topk(0.01))",
        )


def _route_without_effect(s: Techniques) -> Iterator[Conflict]:
    queued = s.scheduling.queues  # messages queue at each hop of the route (of a tree if native)
    if s.collectives.is_native and not queued:
        return
    what, plain = (s.scheduling, "priority, native") if queued else (s.collectives, "native")
    if s.coordination.via != "collective":
        why = "no all-reduce runs, so the route of an all-reduce has no effect"
        instead = f"use {plain}"
    elif Trait.SUMS not in s.compression.traits:
        why = "a route sums messages, but those of this compressor are gathered"
        instead = f"use {plain}, or use cast"
    else:
        return
    yield Conflict(f"{what} x {s.coordination}, {s.compression}", why, instead)


def _route_fits_data_degree(s: Techniques) -> Iterator[Conflict]:
    if s.partition.data is not None:
        yield from _route_fits(s, s.partition.data)


def _route_fits(s: Techniques, workers: int) -> Iterator[Conflict]:
    if s.coordination.via == "collective" and (why := s.collectives.refusal(workers)):
        instead = "use ring or butterfly, which work for any number, or change the group sizes"
        yield Conflict(f"{s.collectives} x {workers} workers", why, instead)


def _only_sums_are_scattered(s: Techniques) -> Iterator[Conflict]:
    if not s.scheduling.scatters:
        return
    if s.coordination.via != "collective":
        why = "reduce-scatter and all-gather are collectives, and no collective runs here"
        instead = "use all_reduce, or fifo"
    elif not s.collectives.is_native:
        why = "this schedule uses torch's reduce-scatter and all-gather, not a route"
        instead = "use native"
    elif Trait.SUMS not in s.compression.traits or Trait.ELEMENTWISE not in s.compression.traits:
        why = "a reduce-scatter can only sum messages entry by entry"
        instead = "use exact or cast"
    else:
        return
    yield Conflict(f"{s.scheduling} x {s.coordination}, {s.compression}", why, instead)


def _cut_replicas_use_collectives(s: Techniques) -> Iterator[Conflict]:
    if s.partition.cuts and s.coordination.via != "collective":
        yield Conflict(
            f"{s.partition} x {s.coordination}",
            "a replica of several ranks cannot talk to servers or peers as one worker",
            "use all_reduce, with bsp or local(h)",
        )


def _one_replica_has_no_peer(s: Techniques) -> Iterator[Conflict]:
    if s.partition.data == 1:
        yield from _no_peer(s)


def _no_peer(s: Techniques) -> Iterator[Conflict]:
    """Yield a conflict if a technique has no use when there is only one replica."""
    plain = sends_gradients(s) and s.coordination.via == "collective"
    if not (plain and Trait.LOSSLESS in s.compression.traits and s.collectives.is_native):
        yield Conflict(
            f"{s.partition} x {s.coordination}, {s.synchrony}, {s.compression}, {s.collectives}",
            "there is one replica, which has no peer to agree with",
            "use data(2) or more, or leave out the other techniques",
        )


RULES: tuple[Rule, ...] = (
    _collective_waits, _peers_have_no_clock, _gossip_is_exact, _factors_are_of_gradients,
    _nothing_to_overlap, _slices_need_sliceable, _changes_need_a_scale, _one_message_a_push,
    _merging_needs_a_tree, _route_without_effect, _only_sums_are_scattered,
    _route_fits_data_degree, _cut_replicas_use_collectives, _one_replica_has_no_peer,
)  # fmt: skip


def _with_closure(facts: Facts) -> Iterator[Conflict]:
    if facts.closure and facts.clips:
        why = "the optimizer uses each gradient before it could be clipped"
        yield Conflict("closure x clip", why, "leave out clip, or update without a closure")
    if facts.closure and facts.skips:
        why = "the optimizer updates the model before the step could be skipped"
        instead = "use nonfinite='stop', or update without a closure"
        yield Conflict("closure x nonfinite='skip'", why, instead)


def bound_conflicts(s: Techniques, facts: Facts) -> list[Conflict]:
    """Return the conflicts of a strategy with the number of ranks, the model or the optimizer."""
    conflicts = [*_with_closure(facts)]
    if s.partition.cuts and s.partition.data is None and facts.ranks == s.partition.ranks:
        conflicts += _no_peer(s)
    if s.partition.data is None:
        conflicts += _route_fits(s, s.partition.replicas(facts.ranks))
    if s.scheduling.early and facts.clips:
        why = "the next forward starts before all gradients arrive, and the norm needs all of them"
        conflicts.append(Conflict(f"{s.scheduling} x clip", why, "use wfbp, or leave out clip"))
    if s.scheduling.early and facts.skips:
        why = "a step can be skipped only before any of its updates ran"
        what, instead = f"{s.scheduling} x nonfinite='skip'", "use wfbp, or nonfinite='stop'"
        conflicts.append(Conflict(what, why, instead))
    if facts.momentum and Trait.MOMENTUM in s.compression.traits:
        why = "this compressor applies momentum, and the optimizer would apply momentum again"
        instead = "use SGD(momentum=0), not Adam"
        conflicts.append(Conflict(f"{s.compression} x momentum", why, instead))
    if facts.closure and not (sends_gradients(s) and Trait.LOSSLESS in s.compression.traits):
        why = "a closure runs several times per step and needs exact gradients each time"
        what = f"closure x {s.coordination}, {s.synchrony}, {s.compression}"
        conflicts.append(Conflict(what, why, "use exact with all_reduce and bsp"))
    if facts.closure and (s.scheduling.early or s.partition.cuts):
        why = "with a closure, backward and the update both run inside the optimizer's own step"
        what = f"closure x {s.partition}, {s.scheduling}"
        conflicts.append(Conflict(what, why, "use data with wfbp"))
    if facts.models > 1 and (s.partition.cuts or s.coordination.via == "server"):
        why = "cut replicas and servers support one model, but the user's own loop updates several"
        what = f"{facts.models} models x {s.partition}, {s.coordination}"
        conflicts.append(Conflict(what, why, "use data with all_reduce or gossip"))
    return conflicts


def advice(s: Techniques) -> tuple[str, ...]:
    """Return warnings about techniques that are allowed but unwise, one text for each."""
    texts, traits = [], s.compression.traits
    needs_no_feedback = Trait.CONSERVING | Trait.ELEMENTWISE | Trait.UNBIASED
    if Trait.CONTRACTIVE in traits and not traits & needs_no_feedback:
        better = f"error_feedback({s.compression}) converges better, because it sends it later"
        texts.append(f"{s.compression} discards the part that it does not send: {better}")
    if Trait.MOMENTUM in traits:
        texts.append(f"{s.compression} applies momentum itself: use SGD(momentum=0), not Adam")
    if s.synchrony.free:
        texts.append("asp does not bound staleness: lower the learning rate, or use ssp(3)")
    if s.coordination.outer is not None and s.synchrony.period == 1:
        pair = f"{s.coordination} with {s.synchrony}"
        texts.append(f"{pair} has blocks of one step only: try local(8)")
    if s.synchrony.period > 64:
        texts.append(f"{s.synchrony} lets replicas diverge for many steps: try local(16)")
    if not s.scheduling.overlaps and can_overlap(s):
        texts.append(f"{s.scheduling} leaves the link idle during backward: use wfbp")
    return tuple(texts)
