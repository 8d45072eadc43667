"""Divide layers into messages, from the last to the first. Small ones are fused, large ones cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.axes.scheduling.schedule import Event, Layer, Slice, Task

GRAIN = 16  # slices start at multiples of 16 bytes, so no number of any dtype is split
SPARE = 16  # a message of whole layers may have 1/16 more bytes than ``size``


def whole(layers: Sequence[Layer], index: int) -> Slice:
    """Return the slice that is the whole layer."""
    return Slice(index, 0, layers[index].nbytes)


def cut(layers: Sequence[Layer], index: int, size: int) -> Iterator[Slice]:
    """Yield the slices of about ``size`` bytes of one layer. An empty layer is one empty slice."""
    nbytes = layers[index].nbytes
    size = max(GRAIN, size - size % GRAIN)
    for start in range(0, max(nbytes, 1), size):
        yield Slice(index, start, min(start + size, nbytes))


def fill(layers: Sequence[Layer], threshold: int) -> Iterator[tuple[int, ...]]:
    """Yield groups of layers of at most ``threshold`` bytes. A larger layer is a group alone."""
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
    """Return a message of whole layers, ready after backward of the first, due at the update."""
    slices = tuple(whole(layers, index) for index in group)
    return Task(slices, "reduce", Event("backward", min(group)), Event("update"))


def blocks(layers: Sequence[Layer], size: int) -> Iterator[tuple[Slice, ...]]:
    """Yield messages of about ``size`` bytes, from the last layer to the first.

    Small layers are fused up to 17/16 of ``size``, so that a matrix of exactly ``size`` bytes and
    its bias are one message. A layer with more than 17/16 of ``size`` is cut.
    """
    most = size + size // SPARE
    for group in fill(layers, most):
        if layers[group[0]].nbytes > most:
            yield from ((piece,) for piece in cut(layers, group[0], size))
        else:
            yield tuple(whole(layers, index) for index in group)


def fuse(layers: Sequence[Layer], first: int, limit: int) -> Iterator[tuple[int, ...]]:
    """Yield groups of layer indices, from the last layer to the first.

    A group is full when it has ``limit`` bytes or more. The first group is full at ``first`` bytes,
    if that is less than ``limit``, so that the first message is sent early.
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
