"""TicTac: what comes back from servers comes in the order in which forward uses it.

A forward is a chain of layers. With one link, the layer that unlocks computation soonest is the
first that is still missing, so both orders pull it first. They differ in what they know:

* ``tic`` knows no times: it pulls after backward, layer by layer in forward order;
* ``tac`` measures them: gradients leave during backward, and of those that are ready whenever the
  link is free, the one that forward needs first.

Differs from the paper: the graph is the chain of parameters, a push and its pull are one message
each way, and what is larger than a shard of 4 MB is cut, so that servers share it. Any wire will
do, servers or not.

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
    """Send tensors such that what the next forward needs first comes back first.

    Args:
        order: ``tac`` by measured times, during backward; ``tic`` without, after it.

    Example: ``tictac``, ``tictac(tic)``.
    """
    if order == "tic":
        return Schedule("tictac(tic)", _tic, slices=True, early=True)
    if order == "tac":
        return Schedule("tictac", _tac, overlaps=True, slices=True, early=True, measures="times")
    raise BadArgument(f"tictac({order})", "the orders are tac and tic")


def _tic(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
    over = Event("backward", 0)
    return tuple(
        Task((piece,), "reduce", over, Event("forward", index), index)
        for index in range(len(layers))
        for piece in cut(layers, index, SHARD)
    )


def _tac(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
    return tuple(by_need(layers, cost, slices(layers, SHARD)))
