"""Prove a collective: run its copies on multisets of ranks instead of numbers.

The content of a chunk is how often each rank's contribution is in it. Numbers could be right by
luck or by cancellation; multisets cannot.
"""

from __future__ import annotations

from collections import Counter

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.errors import BadArgument

Contents = dict[tuple[int, int], "Counter[int]"]
"""(rank, chunk) -> how often each rank's contribution is in it."""


def prove(collective: Collective, world: int) -> None:
    """Check that every rank ends with every rank's part exactly once in every chunk.

    A native collective has no rounds to prove.

    Raises:
        BadArgument: it names the wrong rank, chunk and round.
    """
    if collective.rounds is None:
        return
    call = f"prove({collective}, world={world})"
    chunks = collective.chunks(world)
    contents: Contents = {(r, c): Counter([r]) for r in range(world) for c in range(chunks)}
    written: dict[tuple[int, int], int] = {}
    for number, copies in enumerate(collective.rounds(world)):
        _check(copies, world=world, chunks=chunks, where=f"{call}: round {number}")
        contents = _after(contents, copies)
        written.update({(copy.target, copy.chunk): number for copy in copies})
    for (rank, chunk), parts in contents.items():
        if wrong := _wrong(parts, world):
            last = written.get((rank, chunk))
            when = "never written" if last is None else f"last written in round {last}"
            raise BadArgument(call, f"rank {rank} chunk {chunk} ({when}) {wrong}")


def _after(contents: Contents, copies: Round) -> Contents:
    """Return the contents after a round; every copy reads the contents before it."""
    after = dict(contents)
    for source, target, chunk, add in copies:
        own = after[target, chunk] if add else Counter[int]()
        after[target, chunk] = own + contents[source, chunk]
    return after


def _check(copies: Round, *, world: int, chunks: int, where: str) -> None:
    """Raise on a copy outside the world, and on two copies whose order would matter."""
    into: dict[tuple[int, int], Copy] = {}
    for copy in copies:
        source, target, chunk, add = copy
        if not (0 <= source < world and 0 <= target < world and 0 <= chunk < chunks):
            raise BadArgument(where, f"{copy} is outside {world} ranks and {chunks} chunks")
        if source == target:
            raise BadArgument(where, f"{copy} goes from rank {source} to itself")
        other = into.setdefault((target, chunk), copy)
        if other is not copy and not (add and other.add):
            why = f"{other} and {copy} write rank {target} chunk {chunk} at the same time"
            raise BadArgument(where, why)


def _wrong(parts: Counter[int], world: int) -> str:
    lacking = [rank for rank in range(world) if parts[rank] == 0]
    double = [rank for rank in range(world) if parts[rank] > 1]
    reasons = []
    if lacking:
        reasons.append(f"lacks the part of rank {', '.join(map(str, lacking))}")
    if double:
        reasons.append(f"has more than once the part of rank {', '.join(map(str, double))}")
    return " and ".join(reasons)
