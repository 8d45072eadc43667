"""How a collective's route is run between the workers there are."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.axes.collectives import Collective, Network, tree
from shoal.axes.collectives.collective import UNKNOWN
from shoal.errors import LayoutMismatch
from shoal.wire.collective import Route
from shoal.wire.hops import Path
from shoal.wire.probe import probe
from shoal.wire.route import legs, run_legs

if TYPE_CHECKING:
    from shoal.runtime.modes import Seat

_log = logging.getLogger(__name__)
Group = dist.ProcessGroup | None


def routed(collective: Collective, seat: Seat, group: Group) -> Route | None:
    """What sums a flat tensor over the group by this route; None for torch's own all-reduce."""
    if collective.choose is not None:
        return Choice(collective.choose, seat, group, probes=collective.probes)
    if collective.rounds is None:
        return None
    mine = legs(collective.rounds(seat.workers), seat.worker)
    return partial(run_legs, mine=mine, chunks=collective.chunks(seat.workers), group=group)


def paths(collective: Collective, seat: Seat, group: Group) -> Callable[[Tensor], Path]:
    """Which legs sum a flat tensor by this route; a tree's where it has no hops of its own."""
    choose = collective.choose
    if choose is None:
        path = _path(_with_hops(collective), seat)
        return lambda tensor: path

    def with_hops(nbytes: float, workers: int, network: Network) -> Collective:
        return _with_hops(choose(nbytes, workers, network))

    choice = Choice(with_hops, seat, group, probes=collective.probes)
    laid: dict[Collective, Path] = {}

    def chosen(tensor: Tensor) -> Path:
        route = choice.collective(tensor)
        if route not in laid:
            laid[route] = _path(route, seat)
        return laid[route]

    return chosen


def _with_hops(collective: Collective) -> Collective:
    return tree() if collective.is_native else collective


def _path(collective: Collective, seat: Seat) -> Path:
    rounds = collective.rounds(seat.workers) if collective.rounds is not None else ()
    return Path(legs(rounds, seat.worker), collective.chunks(seat.workers))


class Choice:
    """Another route for each size, chosen when the first message of that size comes.

    Before the first message of all the network is measured, by all workers together and on the
    device of that message. Messages come in the same order everywhere, and the measurements are
    agreed, so every worker chooses the same. A choice by a file is compared with everyone's, since
    hosts may hold different files of one name.

    Args:
        choose: (nbytes, workers, network) -> the route.
        seat: which worker this is.
        group: the workers taking part.
        probes: measure the network; else what is chosen does not depend on it.
    """

    def __init__(
        self,
        choose: Callable[[float, int, Network], Collective],
        seat: Seat,
        group: Group,
        *,
        probes: bool,
    ) -> None:
        self._choose, self._seat, self._group = choose, seat, group
        self._probes = probes
        self._network = None if probes else UNKNOWN
        self._routes: dict[int, Route] = {}
        self.chosen: dict[int, Collective] = {}
        """nbytes -> the route that carries messages of that size."""

    def __call__(self, tensor: Tensor) -> None:
        """Sum a flat tensor over the group, in place."""
        chosen = self.collective(tensor)
        if tensor.nbytes not in self._routes:
            route = routed(chosen, self._seat, self._group) or partial(_native, group=self._group)
            self._routes[tensor.nbytes] = route
        self._routes[tensor.nbytes](tensor)

    def collective(self, tensor: Tensor) -> Collective:
        """The route for a tensor of that size, chosen when the first comes."""
        nbytes = tensor.nbytes
        if nbytes in self.chosen:
            return self.chosen[nbytes]
        if self._network is None:
            message, native = probe(self._group, tensor.device)
            self._network = Network(message.cost, native.cost)
        chosen = self.chosen[nbytes] = self._choose(nbytes, self._seat.workers, self._network)
        if not self._probes:
            self._compare(chosen, tensor)
        if self._seat.worker == 0:
            _log.info("messages of %d bytes go by the route %s", nbytes, chosen)
        return chosen

    def _compare(self, chosen: Collective, tensor: Tensor) -> None:
        mark = zlib.crc32(repr(chosen).encode())
        marks = torch.tensor([mark, -mark], dtype=torch.int64, device=tensor.device)
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=self._group)
        if marks[0] != -marks[1]:
            raise LayoutMismatch(
                f"worker {self._seat.worker} was told to send {tensor.nbytes} bytes by {chosen}, "
                "and another by another route: give all hosts the same report of shoal bench routes"
            )


def _native(tensor: Tensor, group: Group) -> None:
    dist.all_reduce(tensor, group=group)
