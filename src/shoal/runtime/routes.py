"""How a collective's route is run between the workers there are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from shoal.axes.collectives import Collective, Network
from shoal.wire.collective import Route
from shoal.wire.probe import probe
from shoal.wire.route import legs, run_legs

if TYPE_CHECKING:
    from shoal.runtime.modes import Seat

_log = logging.getLogger(__name__)
Group = dist.ProcessGroup | None


def routed(collective: Collective, seat: Seat, group: Group) -> Route | None:
    """What sums a flat tensor over the group by this route; None for torch's own all-reduce."""
    if collective.choose is not None:
        return Choice(collective.choose, seat, group)
    if collective.rounds is None:
        return None
    mine = legs(collective.rounds(seat.workers), seat.worker)
    return partial(run_legs, mine=mine, chunks=collective.chunks(seat.workers), group=group)


class Choice:
    """Another route for each size, chosen when the first message of that size comes.

    Before the first message of all the network is measured, by all workers together and on the
    device of that message. Messages come in the same order everywhere, and the measurements are
    agreed, so every worker chooses the same.

    Args:
        choose: (nbytes, workers, network) -> the route.
        seat: which worker this is.
        group: the workers taking part.
    """

    def __init__(
        self, choose: Callable[[float, int, Network], Collective], seat: Seat, group: Group
    ) -> None:
        self._choose, self._seat, self._group = choose, seat, group
        self._network: Network | None = None
        self._routes: dict[int, Route] = {}
        self.chosen: dict[int, Collective] = {}
        """nbytes -> the route that carries messages of that size."""

    def __call__(self, tensor: Tensor) -> None:
        """Sum a flat tensor over the group, in place."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes not in self._routes:
            self._routes[nbytes] = self._route(nbytes, tensor)
        self._routes[nbytes](tensor)

    def _route(self, nbytes: int, tensor: Tensor) -> Route:
        if self._network is None:
            message, native = probe(self._group, tensor.device)
            self._network = Network(message.cost, native.cost)
        chosen = self._choose(nbytes, self._seat.workers, self._network)
        self.chosen[nbytes] = chosen
        if self._seat.worker == 0:
            _log.info("messages of %d bytes go by the route %s", nbytes, chosen)
        return routed(chosen, self._seat, self._group) or partial(_native, group=self._group)


def _native(tensor: Tensor, group: Group) -> None:
    dist.all_reduce(tensor, group=group)
