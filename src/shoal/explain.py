"""Describe a strategy in English: what each worker does in one step, and what it sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shoal import rules
from shoal.axes.compression import Compressor, Trait, Value
from shoal.axes.coordination import spectral_gap
from shoal.flow import Ask, alone, drive, nbytes
from shoal.strategy import Strategy

SIDE = 512  # rows and columns of the matrix with which the message sizes are measured


@dataclass(frozen=True)
class Explanation:
    """The description of a strategy; ``str()`` formats it for a terminal.

    Attributes:
        strategy: the strategy as text.
        workers: the number of ranks.
        step: what a worker does in one step, in order. The subject of each text is the worker.
        sends: what each worker sends, in which form and by which route.
        advice: warnings about choices that are allowed but unwise.
    """

    strategy: str
    workers: int
    step: tuple[str, ...]
    sends: tuple[str, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.strategy, "", f"In one step each of {self.workers} workers"]
        lines += [f"  {number}. {text}" for number, text in enumerate(self.step, 1)]
        lines += ["", "Sent"] + [f"  - {text}" for text in self.sends]
        if self.advice:
            lines += ["", "Advice"] + [f"  - {text}" for text in self.advice]
        return "\n".join(lines)


def explain(strategy: Strategy, workers: int) -> Explanation:
    """Describe a strategy for a number of ranks.

    Raises UsageError if the strategy's partition does not allow this number.

    >>> from shoal.strategy import parse
    >>> print(explain(parse("local(8)"), 4).step[-1])
    on every 8th step averages the change of its last 8 steps over all, and takes the mean change
    """
    replicas = strategy.partition.replicas(workers)
    return Explanation(
        repr(strategy),
        workers,
        tuple(_step(strategy, replicas)),
        tuple(_sends(strategy, replicas)),
        strategy.advice(),
    )


def _step(s: Strategy, replicas: int) -> Iterator[str]:
    yield from _cut(s, replicas)
    if s.coordination.sends == "parameter" and s.synchrony.waits:
        yield f"sends its model to its neighbours while it computes{_every(s)}"
    yield "computes the loss and the gradient of its part of the batch"
    if replicas == 1:
        yield "updates its model alone, because there is no other replica"
    elif rules.sends_gradients(s):
        yield _when(s)
        yield "updates its model with the mean gradient, which is the same on all workers"
    elif s.synchrony.waits and s.coordination.sends == "parameter":
        yield f"takes its own optimizer step, then mixes in its neighbours' models{_every(s)}"
    elif s.synchrony.waits:
        yield "takes its own optimizer step"
        h = s.synchrony.period
        then = "takes the mean change"
        if (outer := s.coordination.outer) is not None:
            then = f"moves by {outer.rate:g} of the mean change and "
            then += f"{outer.momentum_of(replicas):.3g} of the previous move"
        change = f"the change of its last {h} steps"
        yield f"on every {ordinal(h)} step averages {change} over all, and {then}"
    elif s.coordination.via == "server":
        yield from _push(s)
    else:
        yield "takes its own optimizer step"
        yield "averages its model with one random neighbour's; no other worker waits"


def _cut(s: Strategy, replicas: int) -> Iterator[str]:
    p = s.partition
    each = f" of {p.ranks} ranks each" if p.cuts else ""
    yield f"takes its part of the global batch ({replicas} replicas{each}, weighted by samples)"
    if p.shard > 1:
        yield f"gathers each layer's parameters from {p.shard} shards when it needs them (FSDP2)"
    if p.tensor > 1:
        yield f"computes its share, 1/{p.tensor}, of each layer and sums inside the layer (DTensor)"
    if p.pipe > 1:
        yield f"runs one of {p.pipe} stages and sends each micro-batch's activations to the next"


def _when(s: Strategy) -> str:
    if s.scheduling.contenders:
        how = "with the message sizes and the order that were measured to be fastest"
    elif s.scheduling.early:
        where = ", which overtake others at every hop" if s.scheduling.queues else ""
        how = f"{'in slices' if s.scheduling.slices else 'one by one'}, first layers first{where}; "
        how += "a layer's next forward starts when its own gradients have arrived"
    elif s.scheduling.overlaps:
        how = "while backward still computes earlier layers"
    else:
        how = "after backward"
    through = ", through the servers," if s.coordination.via == "server" else ""
    return f"agrees with all other workers{through} on the gradient, {how}"


def _every(s: Strategy) -> str:
    return f", every {ordinal(s.synchrony.period)} step" if s.synchrony.period > 1 else ""


def ordinal(number: int) -> str:
    """Return a number as an English ordinal.

    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 22, 112)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd', '112th']
    """
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _push(s: Strategy) -> Iterator[str]:
    yield "pushes its gradient to the servers, which divide it by the number of workers and step"
    if s.synchrony.free:
        yield "pulls the servers' model and continues without waiting for any other worker"
    else:
        bound = int(s.synchrony.staleness)
        yield f"waits while over {bound} steps ahead of the slowest worker, then pulls the model"


def _sends(s: Strategy, replicas: int) -> Iterator[str]:
    if replicas == 1:
        yield "nothing between replicas"
        return
    asks, each = measured(s.compression)
    what = "gradient" if rules.sends_gradients(s) or not s.synchrony.waits else "change"
    what = "model" if s.coordination.sends == "parameter" else what
    lossy = "no loss" if Trait.LOSSLESS in s.compression.traits else "lossy"
    if Trait.CONSERVING in s.compression.traits:
        lossy = "the part that is not sent is kept and sent later"
    yield f"the {what} in the form {s.compression}: {each:.3g} bytes per number ({lossy})"
    yield f"{asks} message{'s' if asks > 1 else ''} for each bucket, {_route(s, replicas)}"
    if s.coordination.via == "peers":
        gap = spectral_gap(s.coordination.mixing(replicas, 0))
        yield f"disagreement between workers shrinks by {gap:.0%} per round (spectral gap)"


def _route(s: Strategy, replicas: int) -> str:
    if s.coordination.via == "server":
        servers = s.coordination.servers
        which = "servers, which never run" if servers > 1 else "server, which never runs"
        return f"to {servers} {which} the training loop"
    if s.coordination.via == "peers":
        return "to neighbours only"
    if Trait.MERGES in s.compression.traits and Trait.ONE_SHOT not in s.compression.traits:
        return f"merged pairwise along a tree of all {replicas} workers"
    if Trait.SUMS not in s.compression.traits:
        return f"gathered from all {replicas} workers, because they cannot be summed"
    if s.scheduling.queues and s.collectives.is_native:
        return f"summed over all {replicas} workers by a tree, because {s.collectives} has no hops"
    return f"summed over all {replicas} workers by the route {s.collectives}"


def measured(compressor: Compressor) -> tuple[int, float]:
    """Compress one random float32 matrix; return the number of asks and the bytes per entry."""
    value = Value(torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)), "matrix")
    sizes: list[int] = []

    def answer(ask: Ask) -> object:
        sizes.append(nbytes(ask))
        return alone(ask)

    drive(compressor.flow(value, compressor.init(value), 0), answer)
    return len(sizes), sum(sizes) / value.tensor.numel()
