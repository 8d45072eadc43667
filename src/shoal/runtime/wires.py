"""Which wire carries a strategy, between the workers there are.

How a collective's route is run between the workers there are.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shoal import rules
from shoal.axes.collectives import Collective, Network, ring, tree
from shoal.axes.collectives.collective import UNKNOWN
from shoal.axes.compression import Trait
from shoal.errors import LayoutMismatch, UsageError
from shoal.strategy import Strategy
from shoal.wire.collective import CollectiveWire, Route
from shoal.wire.neighbours import NeighbourWire
from shoal.wire.null import NullWire
from shoal.wire.probe import blank, in_a_row, probe, race
from shoal.wire.queued import GroupLinks, QueuedRoute, QueuedWire, RoutePlan
from shoal.wire.route import Halves, legs, run_legs
from shoal.wire.wire import Wire

if TYPE_CHECKING:
    from shoal.runtime.context import ReplicaIndex, RunContext
    from shoal.runtime.step.model import ReplicatedModel, ShardedModel

_log = logging.getLogger(__name__)
_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def weighted(strategy: Strategy) -> bool:
    """Whether losses are scaled so that the sum of gradients is already their mean.

    It saves a pass over every gradient. Only where compression treats each entry alone and all
    workers meet in one sum.
    """
    whole = not strategy.partition.cuts and rules.sends_gradients(strategy)
    meets = strategy.coordination.via == "collective"
    return whole and meets and Trait.ELEMENTWISE in strategy.compression.traits


def wire(
    source: ReplicatedModel | ShardedModel, optimizer: torch.optim.Optimizer, context: RunContext
) -> Wire:
    """The wire that a strategy needs between the workers of a context."""
    s = context.strategy
    if context.replica_index.workers > 1 and s.coordination.via == "server":
        from shoal.runtime.remote.client import served

        return served(source, optimizer, context)
    if context.replica_index.workers > 1 and not s.synchrony.waits:
        from shoal.runtime.remote.pairs import PairWire

        return PairWire(source.trainable(), context)
    return collective(s, context.replica_index, context.group)


def collective(strategy: Strategy, index: ReplicaIndex, group: dist.ProcessGroup | None) -> Wire:
    """The wire of strategies that only need a process group."""
    if index.workers == 1:
        return NullWire()
    if strategy.coordination.via == "peers":
        row = strategy.coordination.mixing(index.workers, 0)[index.worker]
        return NeighbourWire(group, row)
    if strategy.scheduling.queues:
        if _reaches_hosts(group):
            queues = QueuedRoute(
                GroupLinks(group, _tag(group)), paths(strategy.collectives, index, group)
            )
            return QueuedWire(group, weighted=weighted(strategy), queues=queues)
        _log.warning(
            "%s: %s sends in one order only, so no message overtakes another",
            strategy.scheduling,
            dist.get_backend(group),
        )
    route = routed(strategy.collectives, index, group)
    rounds = ring().rounds if strategy.scheduling.scatters else None
    halves = Halves(group, list(rounds(index.workers))) if rounds is not None else None
    return CollectiveWire(group, weighted=weighted(strategy), route=route, halves=halves)


def _reaches_hosts(group: dist.ProcessGroup | None) -> bool:
    """Whether messages in the host's memory can be sent: NCCL has no order of a rank's own."""
    return "cpu:" in dist.get_backend_config(group)


def _tag(group: dist.ProcessGroup | None) -> int:
    """One for each wire of a group, so that the messages of several models do not mix.

    Wires are made in the same order on every rank.
    """
    within = group or dist.group.WORLD
    if within is None:
        raise UsageError("there is no process group: call distribute, or init_process_group")
    return next(_tags.setdefault(within, count(1)))


CLEARLY = 0.95  # of the first one's time: less is faster for certain
Group = dist.ProcessGroup | None


def routed(collective: Collective, index: ReplicaIndex, group: Group) -> Route | None:
    """What sums a flat tensor over the group by this route; None for torch's own all-reduce."""
    if collective.choose is not None:
        return RouteTuner(collective, index, group)
    if collective.rounds is None:
        return None
    own_legs = legs(collective.rounds(index.workers), index.worker)
    return partial(
        run_legs, own_legs=own_legs, chunks=collective.chunks(index.workers), group=group
    )


def paths(
    collective: Collective, index: ReplicaIndex, group: Group
) -> Callable[[Tensor], RoutePlan]:
    """Which legs sum a flat tensor by this route; a tree's where it has no hops of its own."""
    if collective.choose is None:
        path = _path(_with_hops(collective), index)
        return lambda tensor: path
    choice = RouteTuner(_among_hops(collective), index, group)
    laid: dict[Collective, RoutePlan] = {}

    def chosen(tensor: Tensor) -> RoutePlan:
        route = _with_hops(choice.collective(tensor))
        if route not in laid:
            laid[route] = _path(route, index)
        return laid[route]

    return chosen


def _among_hops(collective: Collective) -> Collective:
    """The same choice, for which no route is timed that cannot be taken."""
    offered = collective.contenders
    if offered is None:
        return collective

    def contenders(nbytes: float, workers: int, network: Network) -> tuple[Collective, ...]:
        return tuple(dict.fromkeys(map(_with_hops, offered(nbytes, workers, network))))

    return replace(collective, contenders=contenders)


def _with_hops(collective: Collective) -> Collective:
    return tree() if collective.is_native else collective


def _path(collective: Collective, index: ReplicaIndex) -> RoutePlan:
    rounds = collective.rounds(index.workers) if collective.rounds is not None else ()
    return RoutePlan(legs(rounds, index.worker), collective.chunks(index.workers))


class RouteTuner:
    """Another route for each size, chosen when the first message of that size comes.

    Before the first message of all the network is measured, by all workers together and on the
    device of that message; before the first of about a size its contenders are timed, if there are
    such. Messages come in the same order everywhere, and the measurements are agreed, so every
    worker chooses the same. A choice by a file is compared with everyone's, since hosts may hold
    different files of one name.

    Args:
        collective: that chooses.
        index: which worker this is.
        group: the workers taking part.
    """

    def __init__(self, collective: Collective, index: ReplicaIndex, group: Group) -> None:
        if collective.choose is None:
            raise UsageError(f"{collective} chooses nothing: it is one route")
        self._collective, self._seat, self._group = collective, index, group
        self._decide = collective.choose
        self._network = None if collective.probes else UNKNOWN
        self._routes: dict[int, Route] = {}
        self._won: dict[int, Collective] = {}  # by the power of four that was timed
        self.chosen: dict[int, Collective] = {}
        """nbytes -> the route that carries messages of that size."""

    def __call__(self, tensor: Tensor) -> None:
        """Sum a flat tensor over the group, in place."""
        chosen = self.collective(tensor)
        if tensor.nbytes not in self._routes:
            self._routes[tensor.nbytes] = self._runner(chosen)
        self._routes[tensor.nbytes](tensor)

    def collective(self, tensor: Tensor) -> Collective:
        """The route for a tensor of that size, chosen when the first comes."""
        nbytes = tensor.nbytes
        if nbytes in self.chosen:
            return self.chosen[nbytes]
        if self._network is None:
            message, own = probe(self._group, tensor.device)
            self._network = Network(message.cost, own.cost)
        chosen = self.chosen[nbytes] = self._choose(nbytes, tensor.device, self._network)
        if not self._collective.probes:
            self._compare(chosen, tensor)
        if self._seat.worker == 0:
            _log.info("messages of %d bytes go by the route %s", nbytes, chosen)
        return chosen

    def _choose(self, nbytes: int, device: torch.device, network: Network) -> Collective:
        offered = self._collective.contenders
        if offered is None:
            return self._decide(nbytes, self._seat.workers, network)
        near = power_of_four(nbytes)
        if near not in self._won:
            routes = offered(near, self._seat.workers, network)
            self._won[near] = self._fastest(routes, near, device)
        return self._won[near]

    def _fastest(
        self, routes: Sequence[Collective], nbytes: int, device: torch.device
    ) -> Collective:
        """Run them in turns; the first one unless another is clearly faster."""
        zeros, times = blank(nbytes, device), in_a_row(nbytes)
        calls = [partial(_several, self._runner(route), zeros, times) for route in routes]
        seconds = [taken / times for taken in race(calls, self._group, device)]
        told = ", ".join(
            f"{route} {1e3 * taken:.3g} ms" for route, taken in zip(routes, seconds, strict=True)
        )
        _log.debug("%d bytes: %s", nbytes, told)
        least = min(seconds)
        return routes[0 if least >= CLEARLY * seconds[0] else seconds.index(least)]

    def _runner(self, collective: Collective) -> Route:
        return routed(collective, self._seat, self._group) or partial(_native, group=self._group)

    def _compare(self, chosen: Collective, tensor: Tensor) -> None:
        mark = zlib.crc32(repr(chosen).encode())
        marks = torch.tensor([mark, -mark], dtype=torch.int64, device=tensor.device)
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=self._group)
        if marks[0] != -marks[1]:
            raise LayoutMismatch(
                f"worker {self._seat.worker} was told to send {tensor.nbytes} bytes by {chosen}, "
                "and another by another route: give all hosts the same report of shoal bench routes"
            )


def _several(route: Route, tensor: Tensor, times: int) -> None:
    for _ in range(times):
        route(tensor)


def power_of_four(nbytes: int) -> int:
    """The one nearest by ratio, up to 16 MB, above which the fastest stays the fastest.

    >>> power_of_four(3), power_of_four(40 * 2**20) // 2**20
    (4, 16)
    """
    return 1 << 2 * min(12, max(nbytes, 1).bit_length() // 2)  # whole numbers: alike on all hosts


def _native(tensor: Tensor, group: Group) -> None:
    dist.all_reduce(tensor, group=group)
