"""What changes most goes first: slices of the parameters with the largest relative updates.

Each ``every`` steps the workers measure what their last step changed, |update| / |value| of each
parameter, and agree on it; until the next time, whenever the link is free, the ready slice of the
parameter that changes most goes.

Differs from the paper: nothing is left unsent when bandwidth is short, for all wait for each other
here; the order alone is Bosen's.

References:
    Wei et al., `Managed communication and consistency for fast data-parallel iterative analytics
    <https://doi.org/10.1145/2806777.2806778>`_, 2015 (Bosen, relative magnitude).
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.axes.scheduling.priority import by_need, slices
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Task
from shoal.errors import BadArgument
from shoal.notation import check_nbytes, nbytes_text

SIZE, EVERY = 2**20, 10


def magnitude(size: int = SIZE, every: int = EVERY) -> Schedule:
    """Send slices of ``size`` bytes, those of the largest relative updates first.

    Args:
        size: bytes a slice.
        every: steps between looks at what changes most; 1 looks each step.

    Example: ``magnitude``, ``magnitude(256, 1)``.
    """
    check_nbytes("magnitude", size)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise BadArgument(f"magnitude({size}, {every})", "every must be a number of steps from 1")

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        tasks = by_need(
            layers, cost, slices(layers, size), urgency=lambda index: -layers[index].change
        )
        return tuple(task._replace(due=Event("update")) for task in tasks)

    typed = [nbytes_text(size)] if (size, every) != (SIZE, EVERY) else []
    typed += [str(every)] if every != EVERY else []
    name = f"magnitude({', '.join(typed)})" if typed else "magnitude"
    return Schedule(name, plan, overlaps=True, slices=True, measures="changes", every=every)
