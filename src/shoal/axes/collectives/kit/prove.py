"""Check a collective: run its copies on counts of contributions instead of numbers.

For each chunk of each rank, a counter says how often each rank's contribution was added to it.
With numbers, a wrong route could give the right sum by chance.
"""

from __future__ import annotations

from collections import Counter

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.errors import BadArgument

Contents = dict[tuple[int, int], "Counter[int]"]
"""(rank, chunk) -> how often each rank's contribution was added to it."""


def prove(collective: Collective, world: int) -> None:
    """Raise unless every chunk of every rank ends with each rank's contribution exactly once.

    A collective without rounds, such as ``native``, is not checked.

    Raises:
        BadArgument: the collective is wrong; the message names the rank, the chunk and the round.
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
    """Return the contents after a round; every copy reads the contents before the round."""
    after = dict(contents)
    for source, target, chunk, add in copies:
        own = after[target, chunk] if add else Counter[int]()
        after[target, chunk] = own + contents[source, chunk]
    return after


def _check(copies: Round, *, world: int, chunks: int, where: str) -> None:
    """Raise if a rank or chunk does not exist, or if the order of two copies would matter."""
    writers: dict[tuple[int, int], Copy] = {}
    for copy in copies:
        source, target, chunk, add = copy
        if not (0 <= source < world and 0 <= target < world and 0 <= chunk < chunks):
            raise BadArgument(where, f"{copy} is outside {world} ranks and {chunks} chunks")
        if source == target:
            raise BadArgument(where, f"{copy} sends from rank {source} to itself")
        other = writers.setdefault((target, chunk), copy)
        if other is not copy and not (add and other.add):
            why = f"{other} and {copy} write rank {target} chunk {chunk} at the same time"
            raise BadArgument(where, why)


def _wrong(parts: Counter[int], world: int) -> str:
    missing = [rank for rank in range(world) if parts[rank] == 0]
    repeated = [rank for rank in range(world) if parts[rank] > 1]
    reasons = []
    if missing:
        reasons.append(f"lacks the contribution of rank {', '.join(map(str, missing))}")
    if repeated:
        ranks = ", ".join(map(str, repeated))
        reasons.append(f"has the contribution of rank {ranks} more than once")
    return " and ".join(reasons)
