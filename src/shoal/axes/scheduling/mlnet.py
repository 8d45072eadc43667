"""MLNet: sums go up and down a tree of workers, with priority queues at every hop.

Each worker forwards messages of others: partial sums on the way up, results on the way down. Where
several messages are ready for one link, the one that the next forward needs first goes next, not
the one that waited longest. A message in transfer is not interrupted, so tensors are cut into
slices: an urgent message waits for one slice at most.

Messages enter the queues when backward makes them ready, and the queues decide from there on, so
no link has to be measured. Backward ends where forward begins, so the message that was submitted
last is needed first. The plan lists messages as they enter; its price assumes that none overtakes.

The hops are those of the route. Torch's own all-reduce has none, so with ``native`` the sums go by
a tree, as in the paper; with any other route each of its hops has a queue. On a backend that sends
in one order only (NCCL) messages go by the route in the order of the plan, and a warning says so.

Differs from the paper: the root of the tree is a worker, not a parameter server, and priorities are
those of layers within a step, for all workers wait for each other here and no step is behind.

References:
    Mai, Hong & Costa, `Optimizing Network Performance in Distributed Machine Learning
    <https://www.usenix.org/conference/hotcloud15/workshop-program/presentation/mai>`_, 2015.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.axes.scheduling.priority import slices
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Task
from shoal.notation import check_nbytes, nbytes_text

DEFAULT = 2**20


def mlnet(size: int = DEFAULT) -> Schedule:
    """Send slices of ``size`` bytes along a tree; at every hop those needed first overtake others.

    Args:
        size: bytes per slice; smaller slices are overtaken sooner, but are more messages.

    Example: ``mlnet``, ``mlnet(256)``.
    """
    check_nbytes("mlnet", size)

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        tasks = []
        for message in slices(layers, size):
            layer = message[0].layer
            ready, due = Event("backward", layer), Event("forward", layer)
            tasks.append(Task(message, "reduce", ready, due, layer))
        return tuple(tasks)

    name = "mlnet" if size == DEFAULT else f"mlnet({nbytes_text(size)})"
    return Schedule(name, plan, overlaps=True, slices=True, early=True, queues=True)
