"""Group layers into messages: fused, cut, or both; from the last layer to the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.axes.scheduling.schedule import Event, Layer, Slice, Task

GRAIN = 16  # bytes: a cut never splits a number of any type
SPARE = 16  # a message may be longer by 1/16


def whole(layers: Sequence[Layer], index: int) -> Slice:
    """Return the slice of a whole layer."""
    return Slice(index, 0, layers[index].nbytes)


def cut(layers: Sequence[Layer], index: int, size: int) -> Iterator[Slice]:
    """Yield the slices of one layer; a layer of zero bytes is one empty slice."""
    nbytes = layers[index].nbytes
    size = max(GRAIN, size - size % GRAIN)
    for start in range(0, max(nbytes, 1), size):
        yield Slice(index, start, min(start + size, nbytes))


def fill(layers: Sequence[Layer], threshold: int) -> Iterator[tuple[int, ...]]:
    """Group layers from the last to the first; a layer that does not fit starts a new group."""
    group: list[int] = []
    size = 0
    for index in reversed(range(len(layers))):
        nbytes = layers[index].nbytes
        if group and size + nbytes > threshold:
            yield tuple(group)
            group, size = [], 0
        group.append(index)
        size += nbytes
    if group:
        yield tuple(group)


def message(layers: Sequence[Layer], group: Sequence[int]) -> Task:
    """Return a message of whole layers, ready after the last backward, due at the update."""
    slices = tuple(whole(layers, index) for index in group)
    return Task(slices, "reduce", Event("backward", min(group)), Event("update"))


def blocks(layers: Sequence[Layer], size: int) -> Iterator[tuple[Slice, ...]]:
    """Yield messages of about ``size`` bytes, from the last layer to the first.

    Small layers are fused, up to ``17/16 size``: otherwise a bias beside a matrix of just ``size``
    bytes would be a message of its own. A larger layer is cut.
    """
    most = size + size // SPARE
    for group in fill(layers, most):
        if layers[group[0]].nbytes > most:
            yield from ((piece,) for piece in cut(layers, group[0], size))
        else:
            yield tuple(whole(layers, index) for index in group)


def fuse(layers: Sequence[Layer], first: int, limit: int) -> Iterator[tuple[int, ...]]:
    """Group layers from the last to the first; a group is full from ``limit`` bytes on.

    The very first group is full from ``first`` bytes on, so that the link starts early.
    """
    group: list[int] = []
    size, closes = 0, min(first, limit)
    for index in reversed(range(len(layers))):
        group.append(index)
        size += layers[index].nbytes
        if size >= closes:
            yield tuple(group)
            group, size, closes = [], 0, limit
    if group:
        yield tuple(group)
