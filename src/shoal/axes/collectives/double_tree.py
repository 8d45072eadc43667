"""Double binary tree: two trees reduce and broadcast one half of the message each, in segments.

The leaves of one tree (half of the workers) have no children, so their links would be idle most of
the time. So a second tree, in which they are the inner nodes, reduces and broadcasts the other half
of the message. Each half is divided into segments, which are sent one after the other, as in a
pipeline. With ``s`` segments there are at most ``4 (s + ceil(log2 world) - 1)`` rounds, and each
sends ``1 / 2s`` of the message.

An inner node of one tree is a leaf of the other. So in a broadcast a rank receives along at most
two edges, one of each tree, and sends along at most two. The edges can be coloured with two colours
such that the edges into a rank have different colours, and the edges out of a rank, too. Edges of
one colour send in even rounds, those of the other colour in odd rounds, so no rank ever sends or
receives two chunks at once.

The all-reduce is the broadcast of Sanders, Speck & Träff run backwards, and then forwards. A chunk
that could be sent earlier than in the paper is sent earlier.

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
    """Reduce and broadcast half of the message in each of two trees, so that all links are busy.

    Args:
        segments: number of segments of each half. With more segments, links are idle less, but more
            messages are sent.

    Example: ``double_tree``.
    """
    name = "double_tree" if segments == SEGMENTS else f"double_tree({segments})"
    if not is_whole(segments, 1, 64):
        raise BadArgument(name, "segments must be a whole number from 1 to 64")
    return Collective(name, partial(_rounds, segments), partial(_chunks, segments))


class _Hop(NamedTuple):
    """A copy along an edge, sent when its source has received ``needed`` copies of that chunk."""

    order: int  # of several hops that could be sent, the one with the lowest order is sent first
    copy: Copy
    needed: int


def _chunks(segments: int, world: int) -> int:
    return 2 * segments if world > 1 else 1


def _rounds(segments: int, world: int) -> Iterator[Round]:
    """Yield rounds in which each rank sends at most one chunk and receives at most one."""
    waiting = sorted(_hops(segments, world))
    arrived: Counter[tuple[int, int]] = Counter()  # (rank, chunk) -> number of received copies
    while waiting:
        senders: set[int] = set()
        receivers: set[int] = set()
        copies: list[Copy] = []
        later: list[_Hop] = []
        for hop in waiting:
            source, target, chunk, _ = hop.copy
            free = source not in senders and target not in receivers
            if free and arrived[source, chunk] >= hop.needed:
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
    all_edges = edges(both)
    length = max((e.start for e in all_edges), default=0) + 2 * segments - 1  # broadcast rounds
    for number, rank, up, start in all_edges:
        tree = both[number]
        parts = tree.count(rank)  # copies that the rank receives from its children
        whole = tree.count(up) + (tree[up] is not None)  # copies until the parent has the sum
        for segment in range(segments):
            chunk, when = number * segments + segment, start + 2 * segment
            mirror = start + 2 * (segments - 1 - segment)
            yield _Hop(length - 1 - mirror, Copy(rank, up, chunk, True), parts)
            yield _Hop(length + when, Copy(up, rank, chunk, False), whole)


Tree = tuple[int | None, ...]
"""The parent of each rank; None for the root."""


class Edge(NamedTuple):
    """``rank`` and its parent ``up`` in a tree. A broadcast first uses it in round ``start``."""

    tree: int
    rank: int
    up: int
    start: int = 0


def trees(world: int) -> tuple[Tree, Tree]:
    """Return a tree in which odd ranks are leaves, and one in which they are inner nodes."""
    first = _in_order(world)
    # If world is even, mirror the ranks. If it is odd, a mirror would map odd ranks to odd ranks,
    # so shift the ranks instead.
    new_rank = [(world - 1 - r) if world % 2 == 0 else (r + 1) % world for r in range(world)]
    second: list[int | None] = [None] * world
    for rank, up in enumerate(first):
        second[new_rank[rank]] = None if up is None else new_rank[up]
    return first, tuple(second)


def edges(both: tuple[Tree, Tree]) -> tuple[Edge, ...]:
    """Return all edges of both trees, each with the round in which a broadcast first uses it."""
    unscheduled = [
        Edge(number, rank, up)
        for number, tree in enumerate(both)
        for rank, up in enumerate(tree)
        if up is not None
    ]
    colours = _colours(unscheduled)
    starts: dict[tuple[int, int], int] = {}  # (tree, rank) -> the round in which it first receives
    for number, tree in enumerate(both):
        starts[number, tree.index(None)] = -1  # the root has its chunk before the first round
    for edge in sorted(unscheduled, key=lambda e: _depth(both[e.tree], e.rank)):
        soonest = starts[edge.tree, edge.up] + 1
        starts[edge.tree, edge.rank] = soonest + (soonest - colours[edge]) % 2
    return tuple(edge._replace(start=starts[edge.tree, edge.rank]) for edge in unscheduled)


def _in_order(world: int) -> Tree:
    """Return a binary tree of ranks 1 to world - 1 in in-order numbering, below the root 0."""
    parents: list[int | None] = [None] * world
    for rank in range(1, world):
        low = rank & -rank
        up = (rank ^ low) | (low << 1)
        parents[rank] = up if up < world else rank ^ low
    return tuple(parents)


def _depth(tree: Tree, rank: int) -> int:
    up = tree[rank]
    return 0 if up is None else 1 + _depth(tree, up)


def _colours(unscheduled: list[Edge]) -> dict[Edge, int]:
    """Colour each edge 0 or 1. Edges into one rank differ, and so do edges out of one rank."""
    adjacent: dict[tuple[str, int], list[Edge]] = {}
    for edge in unscheduled:
        adjacent.setdefault(("into", edge.rank), []).append(edge)
        adjacent.setdefault(("out of", edge.up), []).append(edge)
    colours: dict[Edge, int] = {}
    for first in unscheduled:
        todo = [] if first in colours else [(first, 0)]
        while todo:  # adjacent edges form a path, or a cycle of even length
            edge, colour = todo.pop()
            colours[edge] = colour
            neighbours = adjacent["into", edge.rank] + adjacent["out of", edge.up]
            todo += [(other, 1 - colour) for other in neighbours if other not in colours]
    return colours
