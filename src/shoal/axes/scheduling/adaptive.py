"""Adaptive: fuse or cut tensors, whichever is measured to be faster; choose again if times change.

If the startup of messages takes most of the time, small tensors are fused. If the bytes take most
of the time, large tensors are cut, so that the gradients of the first layers can be sent before
those of other layers and the next forward starts early. One plan may do both.

1. The seconds of plans of both kinds are computed from measured times of layers and messages
   (``kit.playing``).
2. The best plan of each kind, and ``wfbp``, run for a few steps. Then the plans that are about as
   fast as the fastest one run once more.
3. The fastest plan is used until the times of messages change.

References:
    Shi et al., `A quantitative survey of communication optimizations in distributed deep learning
    <https://arxiv.org/abs/2005.13247>`_, 2021 (asks for a choice between fusion and partition).
    Peng et al., `ByteScheduler <https://doi.org/10.1145/3341301.3359642>`_, 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from shoal.axes.scheduling.fused import fused
from shoal.axes.scheduling.kit.grouping import blocks
from shoal.axes.scheduling.kit.playing import seconds
from shoal.axes.scheduling.merged import merged
from shoal.axes.scheduling.priority import DEFAULT as BLOCK
from shoal.axes.scheduling.priority import by_need
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Task
from shoal.axes.scheduling.wfbp import wfbp
from shoal.errors import BadArgument
from shoal.notation import nbytes_text

SIZES = tuple(2**n for n in range(16, 27, 2))  # 64 KB to 64 MB
MAX_MESSAGES = 1024  # a plan with more per step, and with over two per layer, is not considered


def adaptive(early: bool = True) -> Schedule:
    """Fuse small tensors and cut large ones by measured times; choose again when times change.

    Args:
        early: whether a layer's next forward may start before all gradients have arrived. The norm
            of all gradients is then not known in time, so clipping needs ``early=False``.

    Example: ``adaptive``, ``adaptive(early=False)``.
    """
    if not isinstance(early, bool):
        raise BadArgument(f"adaptive(early={early})", "early must be True or False")

    def contenders(layers: Sequence[Layer], cost: Cost) -> tuple[Schedule, ...]:
        def best(kind: Iterable[Schedule]) -> Schedule:
            return min(kind, key=lambda s: price(s, layers, cost))

        # Plans without early forwards are timed too, because one update of all parameters takes
        # less time than one per message, and computed seconds do not include the update. wfbp is
        # timed because the cost model assumes one message at a time, which may be wrong.
        plain = best(_fusions()), wfbp(BLOCK), wfbp()
        cuts = (best(map(_early, _fusions())), best(_partitions())) if early else ()
        return (*sorted(cuts, key=lambda s: price(s, layers, cost)), *dict.fromkeys(plain))

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        return contenders(layers, cost)[0].plan(layers, cost)

    return Schedule(
        "adaptive" if early else "adaptive(early=False)",
        plan,
        overlaps=True,
        slices=early,
        early=early,
        measures="times",
        contenders=contenders,
    )


def price(schedule: Schedule, layers: Sequence[Layer], cost: Cost) -> float:
    """Return the computed seconds of a step under a schedule, or inf with too many messages."""
    tasks = schedule.plan(layers, cost)
    if len(tasks) > max(MAX_MESSAGES, 2 * len(layers)):
        return float("inf")
    return seconds(tasks, layers, cost)


def _fusions() -> Iterator[Schedule]:
    yield merged()
    yield from map(fused, SIZES)


def _partitions() -> Iterator[Schedule]:
    for size in SIZES:
        name = f"blocks of {nbytes_text(size)}, first layers first"
        yield Schedule(name, partial(_plan, size=size), overlaps=True, slices=True, early=True)


def _plan(layers: Sequence[Layer], cost: Cost, *, size: int) -> tuple[Task, ...]:
    return tuple(by_need(layers, cost, blocks(layers, size)))


def _early(schedule: Schedule) -> Schedule:
    """Return a schedule with the same messages, each due at the forward of its first layer."""

    def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
        tasks = schedule.plan(layers, cost)
        return tuple(t._replace(due=Event("forward", t.slices[-1].layer)) for t in tasks)

    return replace(schedule, name=f"{schedule.name} with early forwards", plan=plan, early=True)
