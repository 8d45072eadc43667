"""Double binary tree: two trees at the same time, each with half of the message, in segments.

In one tree, the leaves (half of the workers) only send up and receive down, so their links are
mostly idle. So a second tree, in which they are the inner nodes, takes the other half of the
message. Each half is cut into segments that follow one another up and down, as in a pipeline. With
``s`` segments there are at most ``4 (s + ceil(log2 world) - 1)`` rounds of ``1 / 2s`` of the
message: each link carries twice the message, after about ``log2 world`` messages that fill the
pipeline.

An inner node of one tree is a leaf of the other. So a rank receives along two edges, one of each
tree, and sends along at most two. The edges can be coloured with two colours such that neither two
edges into a rank nor two edges out of it have the same colour. Edges of one colour send in even
rounds, those of the other colour in odd rounds, so no rank ever sends or receives two chunks at
once.

An all-reduce is the broadcast of Sanders, Speck & Träff after the same broadcast run backwards;
chunks that may go earlier than in the paper do.

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
from shoal.notation import is_whole

SEGMENTS = 4


def double_tree(segments: int = SEGMENTS) -> Collective:
    """Reduce and broadcast in two trees, half of the message each: few messages, all links busy.

    Args:
        segments: of each half; more segments use links better, but are more messages.

    Example: ``double_tree``.
    """
    name = "double_tree" if segments == SEGMENTS else f"double_tree({segments})"
    if not is_whole(segments, 1, 64):
        raise BadArgument(name, "segments must be a whole number from 1 to 64")
    return Collective(name, partial(_rounds, segments), partial(_chunks, segments))


class _Hop(NamedTuple):
    """A copy along an edge, ordered by ``order``; its source first receives ``after`` copies."""

    order: int
    copy: Copy
    after: int


def _chunks(segments: int, world: int) -> int:
    return 2 * segments if world > 1 else 1


def _rounds(segments: int, world: int) -> Iterator[Round]:
    """Yield rounds in which each rank sends at most one chunk and receives at most one."""
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
    paths = edges(both)
    length = max((edge.start for edge in paths), default=0) + 2 * segments - 1  # of a broadcast
    for number, rank, up, start in paths:
        tree = both[number]
        parts = tree.count(rank)  # copies that reach the rank on the way up
        whole = tree.count(up) + (tree[up] is not None)  # and until its parent holds the sum
        for segment in range(segments):
            chunk, when = number * segments + segment, start + 2 * segment
            mirror = start + 2 * (segments - 1 - segment)
            yield _Hop(length - 1 - mirror, Copy(rank, up, chunk, True), parts)
            yield _Hop(length + when, Copy(up, rank, chunk, False), whole)


Tree = tuple[int | None, ...]
"""The parent of each rank; None for the root."""


class Edge(NamedTuple):
    """From ``rank`` to its parent ``up`` in tree 0 or 1; a broadcast first uses it in ``start``."""

    tree: int
    rank: int
    up: int
    start: int = 0


def trees(world: int) -> tuple[Tree, Tree]:
    """Return a tree in which odd ranks are leaves, and one in which they are inner nodes."""
    first = _in_order(world)
    # mirrored, or shifted by one where the mirror would leave odd ranks odd
    to = [(world - 1 - r) if world % 2 == 0 else (r + 1) % world for r in range(world)]
    second: list[int | None] = [None] * world
    for rank, up in enumerate(first):
        second[to[rank]] = None if up is None else to[up]
    return first, tuple(second)


def edges(both: tuple[Tree, Tree]) -> tuple[Edge, ...]:
    """Return all edges of both trees, with the round in which a broadcast first uses each."""
    plain = [
        Edge(number, rank, up)
        for number, tree in enumerate(both)
        for rank, up in enumerate(tree)
        if up is not None
    ]
    colours = _coloured(plain)
    starts: dict[tuple[int, int], int] = {}
    for number, tree in enumerate(both):
        starts[number, tree.index(None)] = -1  # the root holds its chunk before the first round
    for edge in sorted(plain, key=lambda e: _depth(both[e.tree], e.rank)):
        soonest = starts[edge.tree, edge.up] + 1
        starts[edge.tree, edge.rank] = soonest + (soonest - colours[edge]) % 2
    return tuple(edge._replace(start=starts[edge.tree, edge.rank]) for edge in plain)


def _in_order(world: int) -> Tree:
    """Return the tree whose root is rank 0, with a single child, under which ranks lie in order."""
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
    """Return 0 or 1 for each edge; edges into one rank, or out of one, have different colours."""
    adjacent: dict[tuple[str, int], list[Edge]] = {}
    for edge in plain:
        adjacent.setdefault(("into", edge.rank), []).append(edge)
        adjacent.setdefault(("out of", edge.up), []).append(edge)
    colours: dict[Edge, int] = {}
    for first in plain:
        todo = [] if first in colours else [(first, 0)]
        while todo:  # along a path, or a cycle of even length, of adjacent edges
            edge, colour = todo.pop()
            colours[edge] = colour
            near = adjacent["into", edge.rank] + adjacent["out of", edge.up]
            todo += [(other, 1 - colour) for other in near if other not in colours]
    return colours
