"""Double binary tree: two trees at once, each with half of the message, in a pipeline of segments.

In one tree, the leaves (half of the workers) only send up and receive down, and their links idle.
So a second tree takes the other half of the message, in which they are the inner nodes. Each half
is cut into segments that follow one another up and down. With ``s`` segments there are at most
``4 (s + ceil(log2 world) - 1)`` rounds of ``1 / 2s`` of the message: twice the message passes each
link, after some ``log2 world`` messages that fill the pipeline.

The rounds are those of Sanders, Speck & Träff, a broadcast after the same played backwards; what
may go earlier than there does.

References:
    Sanders, Speck & Träff, `Two-tree algorithms for full bandwidth broadcast, reduction and scan
    <https://doi.org/10.1016/j.parco.2009.09.001>`_, 2009.

Two binary trees over the same ranks, and when a broadcast down both may pass each edge.

Who is an inner node of one tree is a leaf of the other. So a rank receives along two edges, one of
each tree, and sends along two at most, and the edges can be coloured with two colours so that
neither two edges into a rank nor two out of it have the same. Edges of one colour pass on what
they have in even rounds, those of the other in odd ones, and nobody ever has two things to do.

References:
    Sanders, Speck & Träff, `Two-tree algorithms for full bandwidth broadcast, reduction and scan
    <https://doi.org/10.1016/j.parco.2009.09.001>`_, 2009.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.errors import BadArgument

SEGMENTS = 4


def double_tree(segments: int = SEGMENTS) -> Collective:
    """Two binary trees, each with half of the message, in segments: few messages, all links busy.

    Args:
        segments: into how many each half is cut; more use links better, and are more messages.

    Example: ``double_tree``.
    """
    if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= 64:
        raise BadArgument(f"double_tree({segments})", "segments are a whole number, 1 to 64")
    name = "double_tree" if segments == SEGMENTS else f"double_tree({segments})"
    chunks = partial(_chunks, segments)
    return Collective(name, rounds=partial(_rounds, segments), chunks=chunks)


class _Hop(NamedTuple):
    """A chunk goes along an edge, in this order, once ``after`` others have reached its source."""

    order: int
    copy: Copy
    after: int


def _chunks(segments: int, world: int) -> int:
    return 2 * segments if world > 1 else 1


def _rounds(segments: int, world: int) -> Iterator[Round]:
    """In each round a rank sends one chunk at most and receives one at most: the first ready."""
    waiting = sorted(_hops(segments, world))
    arrived: Counter[tuple[int, int]] = Counter()  # at (rank, chunk)
    while waiting:
        senders: set[int] = set()
        receivers: set[int] = set()
        copies: list[Copy] = []
        later: list[_Hop] = []
        for hop in waiting:
            source, target, chunk, _ = hop.copy
            free = source not in senders and target not in receivers
            if free and arrived[source, chunk] >= hop.after:
                senders.add(source)
                receivers.add(target)
                copies.append(hop.copy)
            else:
                later.append(hop)
        arrived.update((copy.target, copy.chunk) for copy in copies)
        waiting = later
        yield tuple(copies)


def _hops(segments: int, world: int) -> Iterator[_Hop]:
    both = trees(world)
    found = edges(both)
    length = max((edge.start for edge in found), default=0) + 2 * segments - 1  # of a broadcast
    for number, rank, up, start in found:
        tree = both[number]
        parts = tree.count(rank)  # that reach a rank on their way up
        whole = tree.count(up) + (tree[up] is not None)  # or up to when it holds the sum
        for segment in range(segments):
            chunk, when = number * segments + segment, start + 2 * segment
            mirror = start + 2 * (segments - 1 - segment)
            yield _Hop(length - 1 - mirror, Copy(rank, up, chunk, True), parts)
            yield _Hop(length + when, Copy(up, rank, chunk, False), whole)


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
