"""Which wire carries a strategy, between the workers there are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shoal import rules
from shoal.axes.collectives import ring
from shoal.axes.compression import Trait
from shoal.errors import UsageError
from shoal.runtime.routes import paths, routed
from shoal.strategy import Strategy
from shoal.wire.collective import CollectiveWire
from shoal.wire.halves import Halves
from shoal.wire.hops import GroupLinks, Hops, HopsWire
from shoal.wire.mixing import MixingWire
from shoal.wire.null import NullWire
from shoal.wire.pending import Wire

if TYPE_CHECKING:
    from shoal.runtime.modes import Seat
    from shoal.runtime.source import Cut, Whole
    from shoal.runtime.team import Team

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


def wire(source: Whole | Cut, optimizer: torch.optim.Optimizer, team: Team) -> Wire:
    """The wire that a strategy needs between the workers of a team."""
    s = team.strategy
    if team.seat.workers > 1 and s.coordination.via == "server":
        from shoal.runtime.clients import served

        return served(source, optimizer, team)
    if team.seat.workers > 1 and not s.synchrony.waits:
        from shoal.runtime.peers import PairWire

        return PairWire(source.trainable(), team)
    return collective(s, team.seat, team.group)


def collective(strategy: Strategy, seat: Seat, group: dist.ProcessGroup | None) -> Wire:
    """The wire of strategies that only need a process group."""
    if seat.workers == 1:
        return NullWire()
    if strategy.coordination.via == "peers":
        row = strategy.coordination.mixing(seat.workers, 0)[seat.worker]
        return MixingWire(group, row)
    if strategy.scheduling.queues:
        if _reaches_hosts(group):
            hops = Hops(GroupLinks(group, _tag(group)), paths(strategy.collectives, seat, group))
            return HopsWire(group, weighted=weighted(strategy), hops=hops)
        _log.warning(
            "%s: %s sends in one order only, so no message overtakes another",
            strategy.scheduling,
            dist.get_backend(group),
        )
    route = routed(strategy.collectives, seat, group)
    rounds = ring().rounds if strategy.scheduling.scatters else None
    halves = Halves(group, list(rounds(seat.workers))) if rounds is not None else None
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
