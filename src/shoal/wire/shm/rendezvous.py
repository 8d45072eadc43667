"""How the ranks of a group find each other, and what they then share.

1. Every rank tells the store which system it runs on and who it is (``peers``).
2. The first rank of each system makes a segment; the others map it. One that cannot reach it,
   though it seemed to be on the same system, is treated as a host of its own. Each also tries to
   read the memory of the others (``reading``).
3. The segment is withdrawn: from now on it lives in the mappings alone.

The layout of a segment: lines, then two slots a rank, then a ring for each ordered pair of ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from shoal.errors import BadArgument
from shoal.wire.shm.memory import segment as segments
from shoal.wire.shm.memory.barrier import LINE_NBYTES, Board, Lines
from shoal.wire.shm.memory.buffers import ALIGN, TURNS, Slots
from shoal.wire.shm.memory.cma import NEVER, Reader, Token, finds, least_nbytes
from shoal.wire.shm.memory.peers import Peer, host_key, myself, read_all
from shoal.wire.shm.memory.ring import CELLS, Ring, ring_nbytes
from shoal.wire.shm.memory.segment import Segment
from shoal.wire.shm.node.collectives import Host
from shoal.wire.shm.node.p2p import Post
from shoal.wire.shm.options import megabytes

LIMIT = "SHOAL_SHM_MB"
"""Environment variable: the most megabytes that a group's segment may have."""
_LIMIT_MB = 256.0
_SLOT_NBYTES = 4 << 20
_CELL_NBYTES = 256 << 10
_RINGS_NBYTES = 32 << 20
_UNMAPPED, _MAPPED, _READS = "0", "1", "2"  # whether a rank has the segment, and reads others


class Layout(NamedTuple):
    """Where things lie in the segment of ``size`` ranks."""

    size: int
    slot_nbytes: int
    cell_nbytes: int

    @property
    def slots(self) -> int:
        """Where the slots begin."""
        return segments.rounded(self.size * LINE_NBYTES)

    @property
    def rings(self) -> int:
        """Where the rings begin."""
        return self.slots + TURNS * self.size * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Of the whole segment."""
        return self.rings + self.size**2 * ring_nbytes(self.cell_nbytes)

    def ring(self, sender: int, receiver: int) -> int:
        """Where the ring from one rank to another begins."""
        return self.rings + (sender * self.size + receiver) * ring_nbytes(self.cell_nbytes)


def layout(size: int, limit_nbytes: int) -> Layout:
    """The largest slots and cells, up to the usual, that fit the limit."""
    rings = _RINGS_NBYTES // (CELLS * size**2) // ALIGN * ALIGN  # there are many, mostly unused
    slot, cell = _SLOT_NBYTES, max(min(_CELL_NBYTES, rings), ALIGN)
    while (found := Layout(size, slot, cell)).nbytes > limit_nbytes:
        slot, cell = slot // 2, max(cell // 2, ALIGN)
        if slot < 32 * ALIGN * size:
            raise BadArgument(
                f"{LIMIT}={limit_nbytes / 2**20:.3g}",
                f"too small for {size} ranks, which need {found.nbytes / 2**20:.2g} MB or more",
            )
    return found


def limit_nbytes() -> int:
    """The most that a segment may have: by option, and a quarter of the memory there is."""
    why = "must be a positive number of megabytes"
    limit = megabytes(LIMIT, _LIMIT_MB, valid=lambda found: 0 < found < math.inf, why=why)
    free = _available()
    return int(min(limit * 2**20, free / 4)) if free else int(limit * 2**20)


def _available() -> int:
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


class Meeting(NamedTuple):
    """What a rank knows once all have told who they are.

    Attributes:
        store: of the group.
        rank: of this process in the group.
        names: what each rank of the group is called: its rank in the whole program.
        seconds: how long to wait for others in a collective.
    """

    store: Store
    rank: int
    names: Sequence[int]
    seconds: float


class Room(NamedTuple):
    """One host's part of a group, as one of its ranks sees it."""

    host: Host
    post: Post
    nodes: tuple[tuple[int, ...], ...]  # the group's ranks by host, each ascending


def connect(meeting: Meeting) -> Room:
    """Find the ranks that share memory with this one, and share a segment with them."""
    store, rank, size = meeting.store, meeting.rank, len(meeting.names)
    me, token, limit = myself(), Token(), limit_nbytes()
    store.set(f"peer/{rank}", json.dumps([host_key(), *me, token.card, least_nbytes(), limit]))
    cards = [json.loads(card) for card in read_all(store, [f"peer/{r}" for r in range(size)])]
    keys = [card[0] for card in cards]
    near = [r for r in range(size) if keys[r] == keys[rank]]
    reads = all(finds(cards[r][1], cards[r][3]) for r in near if r != rank)
    wanted = layout(len(near), min(cards[r][5] for r in near))
    segment, plan = _share(store, rank, near, wanted, reached=_READS if reads else _MAPPED)
    reach = [answer.decode() for answer in read_all(store, [f"mapped/{r}" for r in range(size)])]
    del token  # everyone has tried
    nodes = _nodes(keys, [answer != _UNMAPPED for answer in reach])
    mine = next(node for node in nodes if rank in node)
    if segment is None:
        plan = layout(1, limit)
        segment = _alone(plan)
    plan = plan._replace(size=len(mine))
    peers = [Peer(cards[r][1], cards[r][2]) for r in mine]
    names = [meeting.names[r] for r in mine]
    lines = Lines(segment, mine.index(rank), peers=peers, names=names)
    able = all(reach[r] == _READS for r in mine)
    least = max(cards[r][4] for r in mine) if able else NEVER
    return Room(*_furnish(segment, plan, lines, meeting.seconds, least=least), nodes)


def _share(
    store: Store, rank: int, near: Sequence[int], plan: Layout, *, reached: str
) -> tuple[Segment | None, Layout]:
    """Make the segment, or map it, and say that it is ``reached``; None where it cannot be.

    The first of those who are near makes it, as all have planned by the same limit: if it will not
    do, it is told on every rank, and nobody waits for another.
    """
    if near[0] == rank:
        offer = segments.make(plan.nbytes)
        try:
            segment = segments.map_own(offer)
            store.set(f"segment/{rank}", json.dumps([offer.path, offer.nbytes, *plan]))
            store.set(f"mapped/{rank}", reached)
            read_all(store, [f"mapped/{r}" for r in near])
        finally:
            offer.withdraw()
        return segment, plan
    path, nbytes, *told = json.loads(store.get(f"segment/{near[0]}"))
    try:
        found: Segment | None = segments.map_from(path, nbytes)
    except OSError:
        found = None
    store.set(f"mapped/{rank}", _UNMAPPED if found is None else reached)
    return found, Layout(*told)


def _nodes(keys: Sequence[str], reached: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """Ranks by host: those of one system that reached its segment, and each other one alone."""
    hosts: dict[str, list[int]] = {}
    for rank, (key, ok) in enumerate(zip(keys, reached, strict=True)):
        hosts.setdefault(key if ok else f"rank {rank}", []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def _alone(plan: Layout) -> Segment:
    offer = segments.make(plan.nbytes)
    try:
        return segments.map_own(offer)
    finally:
        offer.withdraw()


def _furnish(
    segment: Segment, plan: Layout, lines: Lines, seconds: float, *, least: int
) -> tuple[Host, Post]:
    board, rank, cell = Board(lines, seconds), lines.rank, plan.cell_nbytes
    reader = Reader(board, least)

    def ring(sender: int, receiver: int) -> Ring | None:
        other = receiver if sender == rank else sender
        if sender == receiver:
            return None
        start = plan.ring(sender, receiver)
        return Ring(segment, start, cell_nbytes=cell, lines=lines, other=other)

    slots = Slots(segment, plan.slots, nbytes=plan.slot_nbytes, rank=rank)
    outward = [ring(rank, other) for other in range(lines.size)]
    inward = [ring(other, rank) for other in range(lines.size)]
    return Host(board, slots, reader), Post(board, outward, inward, reader)
