"""Relative magnitude: slices of the parameters with the largest relative updates are sent first.

Every ``every`` steps the workers measure |update| / |value| of each parameter and agree on it.
Until the next measurement, the plan sends at each time the ready slice with the largest ratio.

Differs from the paper: all slices are sent in every step, because here all workers wait for each
other. The paper leaves out slices when bandwidth is short. Only the order is the paper's.

References:
    Wei et al., `Managed communication and consistency for fast data-parallel iterative analytics
    <https://doi.org/10.1145/2806777.2806778>`_, 2015 (Bosen, relative magnitude).
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.axes.scheduling.priority import by_need, slices
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Task
from shoal.errors import BadArgument
from shoal.notation import check_nbytes, is_whole, nbytes_text

SIZE, EVERY = 2**20, 10


def magnitude(size: int = SIZE, every: int = EVERY) -> Schedule:
    """Send slices of ``size`` bytes, first those of parameters with the largest relative updates.

    Args:
        size: bytes per slice.
        every: number of steps from one measurement to the next; with 1 each step is measured.

    Example: ``magnitude``, ``magnitude(256, 1)``.
    """
    check_nbytes("magnitude", size)
    if not is_whole(every, 1):
        raise BadArgument(f"magnitude({size}, {every})", "every must be a whole number >= 1")

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        pieces = slices(layers, size)
        tasks = by_need(layers, cost, pieces, urgency=lambda index: -layers[index].change)
        return tuple(task._replace(due=Event("update")) for task in tasks)

    typed = [nbytes_text(size)] if (size, every) != (SIZE, EVERY) else []
    typed += [str(every)] if every != EVERY else []
    name = f"magnitude({', '.join(typed)})" if typed else "magnitude"
    return Schedule(name, plan, overlaps=True, slices=True, measures="changes", every=every)
