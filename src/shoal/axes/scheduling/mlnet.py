"""MLNet: sums are sent up and down a tree of workers, with a priority queue at every hop.

Each worker forwards messages of others: partial sums on the way up, results on the way down. If
several messages are ready for one link, the one that the next forward needs first is sent next, not
the one that waited longest. A transfer is never interrupted, so tensors are cut into slices: at
each hop an urgent message waits for at most one less urgent slice.

Messages enter the queues when backward makes them ready. The queues decide the order at run time,
so no times have to be measured. Backward ends with the first layer and forward begins with it, so
the message that was submitted last is needed first. The plan lists messages in the order in which
they are submitted. The seconds computed for it assume that no message overtakes another.

The hops are those of the route. Torch's own all-reduce has no hops that could queue messages, so
with ``native`` a tree is used, as in the paper. With another route, each of its hops has a queue.
On a backend that sends in one order only (NCCL), messages are sent in the order of the plan, and a
warning says so.

Differs from the paper: the root of the tree is a worker, not a parameter server. Priorities depend
only on the layer, not on the step, because here all workers are in the same step.

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
    """Send slices of ``size`` bytes along a tree. At every hop the slice needed first goes first.

    Args:
        size: bytes per slice; with smaller slices an urgent one waits less.

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
