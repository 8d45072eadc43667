"""TicTac: messages are sent in the order in which the next forward uses their layers.

A forward is a sequence of layers. It can continue soonest if the first missing layer is transferred
first, so both orders do this. They differ in whether they use times:

* ``tic`` uses no times: it sends after backward, layer by layer in forward order;
* ``tac`` uses measured times: it sends during backward. Whenever the link is free, it sends that
  ready gradient which forward needs first.

Differs from the paper: the graph is the sequence of parameters. Pushing a gradient and pulling the
result are one task. Tensors larger than 4 MB are cut, so that several servers share them. TicTac
works here with and without servers.

References:
    Hashemi, Abdu Jyothi & Campbell, `TicTac <https://arxiv.org/abs/1803.03288>`_, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.axes.scheduling.kit.grouping import cut
from shoal.axes.scheduling.priority import by_need, slices
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Task
from shoal.errors import BadArgument

SHARD = 4 * 2**20


def tictac(order: str = "tac") -> Schedule:
    """Send tensors in the order in which the next forward needs them.

    Args:
        order: ``tac`` sends during backward, by measured times. ``tic`` sends after backward, and
            uses no times.

    Example: ``tictac``, ``tictac(tic)``.
    """
    if order == "tic":
        return Schedule("tictac(tic)", _tic, slices=True, early=True)
    if order == "tac":
        return Schedule("tictac", _tac, overlaps=True, slices=True, early=True, measures="times")
    raise BadArgument(f"tictac({order})", "order must be tac or tic")


def _tic(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
    ready = Event("backward", 0)
    return tuple(
        Task((piece,), "reduce", ready, Event("forward", index), index)
        for index in range(len(layers))
        for piece in cut(layers, index, SHARD)
    )


def _tac(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
    return tuple(by_need(layers, cost, slices(layers, SHARD)))
