"""Laws of every schedule. Each phase sends every byte once, after backward has computed it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from shoal.axes.scheduling import Layer, Schedule, Slice, Task
from shoal.testing.contracts.require import require

GRAIN = 16  # bytes of the largest dtype. Parts start at multiples, so no number is split.


def check_plan(schedule: Schedule, layers: Sequence[Layer]) -> None:
    """Check the plan of a schedule for one list of layers."""
    tasks = schedule.plan(layers, cost)
    label = f"{schedule} of {[layer.nbytes for layer in layers]} bytes:"
    require(tasks == schedule.plan(layers, cost), f"{label} two calls return different plans")
    for phase in ("scatter", "gather") if schedule.scatters else ("reduce",):
        _every_byte_goes_once([t for t in tasks if t.phase == phase], layers, f"{label} {phase}:")
    _what_is_gathered_was_scattered(tasks, label)
    for task in tasks:
        _nothing_goes_before_it_exists(schedule, task, label)
        _arrives_in_time(schedule, task, label)
        _is_one_range(task, layers, label)


def plans_of_few_layers(schedule: Schedule) -> None:
    """Check plans of no layer, one layer, empty layers, and layers of very different sizes."""
    for sizes in ((), (0,), (16,), (0, 64, 0), (2**21, 16, 2**20), (48,) * 9):
        check_plan(schedule, [Layer(f"l{i}", n, 1e-3, 2e-3) for i, n in enumerate(sizes)])


def plans_of_many_layers(schedule: Schedule) -> None:
    """Check plans of layers with random sizes and times."""
    chance = random.Random(0)
    for _ in range(12):
        count = chance.randrange(1, 20)
        check_plan(schedule, [_layer(chance, i) for i in range(count)])


def cost(nbytes: int) -> float:
    """Return the seconds of a message, which are 50 microseconds plus its bytes at 1 GB/s."""
    return 5e-5 + nbytes * 1e-9


def _layer(chance: random.Random, index: int) -> Layer:
    nbytes = 4 * chance.choice([0, 1, 7, 10, 1000, 4096, 50_000])
    return Layer(f"l{index}", nbytes, chance.random() * 1e-3, chance.random() * 2e-3)


def _every_byte_goes_once(tasks: Sequence[Task], layers: Sequence[Layer], label: str) -> None:
    pieces = sorted(piece for task in tasks for piece in task.slices)
    sent_to = dict.fromkeys(range(len(layers)), 0)  # layer -> end of the bytes sent so far
    for layer, start, stop in pieces:
        require(layer in sent_to, label, "there is no such layer as", layer)
        adjacent = start == sent_to[layer] and start <= stop
        require(adjacent, label, "a gap or overlap in layer", layer, "at byte", start)
        sent_to[layer] = stop
    for index, (_, nbytes, *_) in enumerate(layers):
        require(
            sent_to[index] == nbytes, label, "of layer", index, "only bytes up to", sent_to[index]
        )
    sent = {piece.layer for piece in pieces}
    require(sent == set(range(len(layers))), f"{label} there are layers without a task")


def _what_is_gathered_was_scattered(tasks: Sequence[Task], label: str) -> None:
    """Each gather follows a scatter of the same slices. Such a plan has no reduce tasks."""
    scattered: set[tuple[Slice, ...]] = set()
    kinds = {task.phase == "reduce" for task in tasks}
    require(len(kinds) < 2, label, "the plan has reduce tasks and scatter or gather tasks")
    for task in tasks:
        if task.phase == "scatter":
            scattered.add(task.slices)
        elif task.phase == "gather":
            require(task.slices in scattered, label, task, "gathers slices that were not scattered")


def _nothing_goes_before_it_exists(schedule: Schedule, task: Task, label: str) -> None:
    """A task starts after backward of its lowest layer, which backward computes last."""
    kind, layer = task.ready
    require(kind == "backward", label, task, "does not wait for backward")
    first = min(piece.layer for piece in task.slices)
    require(layer <= first, label, task, "starts after backward of layer", layer, "not", first)
    require(schedule.overlaps or layer == 0, label, task, "does not wait for all of backward")


def _arrives_in_time(schedule: Schedule, task: Task, label: str) -> None:
    kind, layer = task.due
    require(kind in ("update", "forward"), label, task, "must be due at an update or a forward")
    if kind == "forward":
        require(schedule.early, label, task, "is due at a forward, but the schedule is not early")
        first = min(piece.layer for piece in task.slices)
        require(layer <= first, label, task, "is due after the forward that needs it")


def _is_one_range(task: Task, layers: Sequence[Layer], label: str) -> None:
    """A task is one range of the flat memory, in which the last layer comes first."""
    for piece in task.slices:
        whole = piece.stop - piece.start == layers[piece.layer].nbytes
        require(whole or piece.start % GRAIN == 0, label, piece, "may cut a number in two")
    order = [piece.layer for piece in task.slices]
    downwards = list(range(order[0], order[0] - len(order), -1))
    require(order == downwards, label, order, "must be consecutive layers in backward order")


def uncut_unless_slices_is_set(schedule: Schedule) -> None:
    """Only a schedule that sets ``slices`` may cut a tensor."""
    layers = [Layer(f"l{i}", 2**21 + 16 * i, 1e-3, 2e-3) for i in range(2)]
    for task in schedule.plan(layers, cost):
        for piece in task.slices:
            whole = (piece.start, piece.stop) == (0, layers[piece.layer].nbytes)
            require(schedule.slices or whole, schedule, "cuts", piece, "but does not set slices")


LAWS = (plans_of_few_layers, plans_of_many_layers, uncut_unless_slices_is_set)
