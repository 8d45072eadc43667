"""Choose the wire for a strategy, and the route of its all-reduces."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
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
from shoal.tuner import Tuner
from shoal.wire.collective import CollectiveWire, Route
from shoal.wire.neighbours import NeighbourWire
from shoal.wire.null import NullWire
from shoal.wire.probe import blank, in_a_row, probe, race
from shoal.wire.queued import GroupLinks, QueuedRoute, QueuedWire, RoutePlan
from shoal.wire.route import TwoStepAllReduce, rank_rounds, run_rounds
from shoal.wire.wire import Wire

if TYPE_CHECKING:
    from shoal.runtime.context import ReplicaIndex, RunContext
    from shoal.runtime.step.model import ReplicatedModel, ShardedModel

CLEARLY = 0.95  # a route is clearly faster if it takes less than this times the first route's time
Group = dist.ProcessGroup | None

_log = logging.getLogger(__name__)
_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def weighted(strategy: Strategy) -> bool:
    """Return whether losses are weighted so that the gradients of all workers add up to the mean.

    This saves the division of all gradients. It requires a compressor that treats each element
    alone, and one all-reduce over all workers.
    """
    whole = not strategy.partition.cuts and rules.sends_gradients(strategy)
    one_sum = strategy.coordination.via == "collective"
    return whole and one_sum and Trait.ELEMENTWISE in strategy.compression.traits


def wire(
    model_part: ReplicatedModel | ShardedModel,
    optimizer: torch.optim.Optimizer,
    context: RunContext,
) -> Wire:
    """Return the wire between the workers of a context, for its strategy."""
    strategy, index = context.strategy, context.replica_index
    if index.workers > 1 and strategy.coordination.via == "server":
        from shoal.runtime.remote.client import connect_to_servers

        return connect_to_servers(model_part, optimizer, context)
    if index.workers > 1 and not strategy.synchrony.waits:
        from shoal.runtime.remote.pairs import PairWire

        return PairWire(model_part.trainable(), context)
    return collective(strategy, index, context.group)


def collective(strategy: Strategy, index: ReplicaIndex, group: Group) -> Wire:
    """Return the wire of a strategy that needs no servers and no pair connections."""
    if index.workers == 1:
        return NullWire()
    if strategy.coordination.via == "peers":
        row = strategy.coordination.mixing(index.workers, 0)[index.worker]
        return NeighbourWire(group, row)
    if strategy.scheduling.queues:
        if "cpu:" in dist.get_backend_config(group):  # NCCL cannot reorder messages
            links = GroupLinks(group, _tag(group))
            queues = QueuedRoute(links, route_plans(strategy.collectives, index, group))
            return QueuedWire(group, weighted=weighted(strategy), queues=queues)
        _log.warning(
            "%s: the backend %s cannot reorder messages, so they are sent in the planned order",
            strategy.scheduling,
            dist.get_backend(group),
        )
    route = routed(strategy.collectives, index, group)
    rounds = ring().rounds if strategy.scheduling.scatters else None
    two_step = TwoStepAllReduce(group, list(rounds(index.workers))) if rounds is not None else None
    return CollectiveWire(group, weighted=weighted(strategy), route=route, two_step=two_step)


def _tag(group: Group) -> int:
    """Return a new message tag for a wire, so that messages of several models do not mix.

    All ranks create their wires in the same order, so they use the same tags.
    """
    within = group or dist.group.WORLD
    if within is None:
        raise UsageError("there is no process group: call distribute or init_process_group first")
    return next(_tags.setdefault(within, count(1)))


def routed(collective: Collective, index: ReplicaIndex, group: Group) -> Route | None:
    """Return a function that sums a flat tensor in place, or None to use torch's all-reduce."""
    if collective.choose is not None:
        return RouteTuner(collective, index, group)
    if collective.rounds is None:
        return None
    own_rounds = rank_rounds(collective.rounds(index.workers), index.worker)
    return partial(
        run_rounds, own_rounds=own_rounds, chunks=collective.chunks(index.workers), group=group
    )


def route_plans(
    collective: Collective, index: ReplicaIndex, group: Group
) -> Callable[[Tensor], RoutePlan]:
    """Return a function from a flat tensor to the plan of the route that sums it.

    Torch's own all-reduce has no messages that could be queued, so a tree is used instead of it.
    """
    if collective.choose is None:
        plan = _route_plan(_queueable(collective), index)
        return lambda tensor: plan
    offered = collective.contenders
    if offered is not None:  # time only routes that can be queued

        def contenders(nbytes: float, workers: int, network: Network) -> tuple[Collective, ...]:
            return tuple(dict.fromkeys(map(_queueable, offered(nbytes, workers, network))))

        collective = replace(collective, contenders=contenders)
    tuner, plan_of = RouteTuner(collective, index, group), cache(partial(_route_plan, index=index))
    return lambda tensor: plan_of(_queueable(tuner.collective(tensor)))


def _queueable(collective: Collective) -> Collective:
    return tree() if collective.is_native else collective


def _route_plan(collective: Collective, index: ReplicaIndex) -> RoutePlan:
    rounds = collective.rounds(index.workers) if collective.rounds is not None else ()
    return RoutePlan(rank_rounds(rounds, index.worker), collective.chunks(index.workers))


class RouteTuner:
    """Sums tensors over a group, and chooses a route when a tensor of a new size arrives.

    1. Before the first message, it measures the network, if the choice depends on it.
    2. Before the first message of a size (rounded to a power of four), it times the contenders, if
       the collective has any.

    All workers send messages in the same order and reduce their measurements, so all choose the
    same route. A choice that was read from a file is compared between workers, because hosts may
    have different files at one path.
    """

    def __init__(self, collective: Collective, index: ReplicaIndex, group: Group) -> None:
        if collective.choose is None:
            raise UsageError(f"{collective} is a single route, so there is nothing to choose")
        self._collective, self._index, self._group = collective, index, group
        self._decide = collective.choose
        self._network = None if collective.probes else UNKNOWN
        self._runner = cache(partial(_runner, index=index, group=group))
        self._fastest: dict[int, Collective] = {}  # the keys are nbytes, rounded to a power of four
        self.chosen: dict[int, Collective] = {}
        """nbytes -> the route of messages of that size."""

    def __call__(self, tensor: Tensor) -> None:
        """Sum a flat tensor over the group, in place."""
        self._runner(self.collective(tensor))(tensor)

    def collective(self, tensor: Tensor) -> Collective:
        """Return the route for a tensor. Choose one if this is the first tensor of its size."""
        nbytes = tensor.nbytes
        if nbytes in self.chosen:
            return self.chosen[nbytes]
        if self._network is None:
            message, native = probe(self._group, tensor.device)
            self._network = Network(message.cost, native.cost)
        chosen = self.chosen[nbytes] = self._choose(nbytes, tensor.device, self._network)
        if not self._collective.probes:
            self._compare(chosen, tensor)
        if self._index.worker == 0:
            _log.info("messages of %d bytes use the route %s", nbytes, chosen)
        return chosen

    def _choose(self, nbytes: int, device: torch.device, network: Network) -> Collective:
        offered, workers = self._collective.contenders, self._index.workers
        if offered is None:
            return self._decide(nbytes, workers, network)
        rounded = power_of_four(nbytes)
        if rounded not in self._fastest:
            routes = offered(rounded, workers, network)
            self._fastest[rounded] = self._time(routes, rounded, device)
        return self._fastest[rounded]

    def _time(self, routes: Sequence[Collective], nbytes: int, device: torch.device) -> Collective:
        """Time the routes, and return the first route unless another is clearly faster."""
        zeros, times = blank(nbytes, device), in_a_row(nbytes)
        calls = [partial(_repeat, self._runner(route), zeros, times) for route in routes]
        seconds = [taken / times for taken in race(calls, self._group, device)]
        rows = zip(routes, seconds, strict=True)
        texts = ", ".join(f"{route} {1e3 * taken:.3g} ms" for route, taken in rows)
        _log.debug("%d bytes: %s", nbytes, texts)
        finalists = {i: taken for i, taken in enumerate(seconds) if taken < math.inf}
        return routes[Tuner(len(routes), clearly=CLEARLY).best(finalists)]

    def _compare(self, chosen: Collective, tensor: Tensor) -> None:
        """Raise LayoutMismatch unless all workers have chosen the same route."""
        digest = zlib.crc32(repr(chosen).encode())
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=tensor.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        if extremes[0] != -extremes[1]:
            raise LayoutMismatch(
                f"worker {self._index.worker} read in its report that {tensor.nbytes} bytes use "
                f"{chosen}, but another worker read another route: give all hosts the same report "
                "of shoal bench routes"
            )


def _runner(route: Collective, index: ReplicaIndex, group: Group) -> Route:
    return routed(route, index, group) or partial(dist.all_reduce, group=group)


def _repeat(route: Route, tensor: Tensor, times: int) -> None:
    for _ in range(times):
        route(tensor)


def power_of_four(nbytes: int) -> int:
    """Return the power of four that is nearest by ratio, but at most 16 MB.

    >>> power_of_four(3), power_of_four(40 * 2**20) // 2**20
    (4, 16)
    """
    return 1 << 2 * min(12, max(nbytes, 1).bit_length() // 2)  # integers, so equal on all hosts
