"""How layers become messages: fused, cut, or both; from the last layer to the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.axes.scheduling.schedule import Layer, Slice

GRAIN = 16  # bytes: cuts fall between whole numbers of every type


def whole(layers: Sequence[Layer], index: int) -> Slice:
    """All of a layer."""
    return Slice(index, 0, layers[index].nbytes)


def cut(layers: Sequence[Layer], index: int, size: int) -> Iterator[Slice]:
    """Slices of one layer; a layer without bytes is one empty slice."""
    nbytes = layers[index].nbytes
    size = max(GRAIN, size - size % GRAIN)
    for start in range(0, max(nbytes, 1), size):
        yield Slice(index, start, min(start + size, nbytes))


def blocks(layers: Sequence[Layer], size: int) -> Iterator[tuple[Slice, ...]]:
    """Messages of about ``size`` bytes, from the last layer to the first.

    Small neighbours are fused, up to ``size``; a layer that is larger is cut, on its own.
    """
    group: list[Slice] = []
    held = 0
    for index in reversed(range(len(layers))):
        nbytes = layers[index].nbytes
        if group and held + nbytes > size:
            yield tuple(group)
            group, held = [], 0
        if nbytes > size:
            yield from ((piece,) for piece in cut(layers, index, size))
        else:
            group.append(whole(layers, index))
            held += nbytes
    if group:
        yield tuple(group)


def fuse(layers: Sequence[Layer], first: int, limit: int) -> Iterator[tuple[int, ...]]:
    """Group layers from the last to the first; from ``limit`` bytes on, a group is full.

    The very first group closes at ``first`` bytes already, so that the link starts early.
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
