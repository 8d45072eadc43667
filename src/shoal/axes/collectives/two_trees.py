"""Two binary trees over the same ranks, and when a broadcast down both may pass each edge.

Who is an inner node of one tree is a leaf of the other. So a rank receives along two edges, one of
each tree, and sends along two at most, and the edges can be coloured with two colours so that
neither two edges into a rank nor two out of it have the same. Edges of one colour pass on what
they have in even rounds, those of the other in odd ones, and nobody ever has two things to do.

References:
    Sanders, Speck & Träff, `Two-tree algorithms for full bandwidth broadcast, reduction and scan
    <https://doi.org/10.1016/j.parco.2009.09.001>`_, 2009.
"""

from __future__ import annotations

from typing import NamedTuple

Tree = tuple[int | None, ...]
"""The parent of each rank; None for the root."""


class Edge(NamedTuple):
    """From ``rank`` to its parent ``up`` in tree 0 or 1; ``start``: when a broadcast passes it."""

    tree: int
    rank: int
    up: int
    start: int = 0


def trees(world: int) -> tuple[Tree, Tree]:
    """A tree in which odd ranks are leaves, and one in which they are not."""
    first = _in_order(world)
    # mirrored, or shifted by one where the mirror would leave odd ranks odd
    to = [(world - 1 - r) if world % 2 == 0 else (r + 1) % world for r in range(world)]
    second: list[int | None] = [None] * world
    for rank, up in enumerate(first):
        second[to[rank]] = None if up is None else to[up]
    return first, tuple(second)


def edges(both: tuple[Tree, Tree]) -> tuple[Edge, ...]:
    """All edges of both trees, each with the round in which a broadcast first passes it."""
    plain = [
        Edge(number, rank, up)
        for number, tree in enumerate(both)
        for rank, up in enumerate(tree)
        if up is not None
    ]
    colours = _coloured(plain)
    starts: dict[tuple[int, int], int] = {}
    for number, tree in enumerate(both):
        starts[number, tree.index(None)] = -1  # the root has it before the first round
    for edge in sorted(plain, key=lambda e: _depth(both[e.tree], e.rank)):
        soonest = starts[edge.tree, edge.up] + 1
        starts[edge.tree, edge.rank] = soonest + (soonest - colours[edge]) % 2
    return tuple(edge._replace(start=starts[edge.tree, edge.rank]) for edge in plain)


def _in_order(world: int) -> Tree:
    """Rank 0 is the root and has a single child, under which the ranks lie in order."""
    parents: list[int | None] = [None] * world
    for rank in range(1, world):
        low = rank & -rank
        up = (rank ^ low) | (low << 1)
        parents[rank] = up if up < world else rank ^ low
    return tuple(parents)


def _depth(tree: Tree, rank: int) -> int:
    up = tree[rank]
    return 0 if up is None else 1 + _depth(tree, up)


def _coloured(plain: list[Edge]) -> dict[Edge, int]:
    """0 or 1 for each edge, no two alike into one rank or out of one (going down)."""
    meeting: dict[tuple[str, int], list[Edge]] = {}
    for edge in plain:
        meeting.setdefault(("into", edge.rank), []).append(edge)
        meeting.setdefault(("out of", edge.up), []).append(edge)
    colours: dict[Edge, int] = {}
    for first in plain:
        todo = [] if first in colours else [(first, 0)]
        while todo:  # along a path or an even ring of edges that meet
            edge, colour = todo.pop()
            colours[edge] = colour
            near = meeting["into", edge.rank] + meeting["out of", edge.up]
            todo += [(other, 1 - colour) for other in near if other not in colours]
    return colours
