"""Connect the ranks of a group, and create the objects that run its collectives and messages.

1. Each rank writes its host key and its process id to the store (``peers``).
2. Of the ranks with the same host key, the first creates a segment and the others map it. A rank
   that cannot map it becomes a node of its own. Each rank also tries to read the memory of
   other ranks (``cma``).
3. The creator closes the file of the segment, which exists from then on only as mapped memory.
4. The ranks of a group on several nodes also connect over gloo (``multinode``).

The segment of ``n`` ranks::

    | n headers | 2 n slots          | n * n rings                             |
    | (barrier) | (buffers)          | (ring): one for each (sender, receiver) |
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from shoal.errors import BadArgument
from shoal.wire.shm.memory import segment as segments
from shoal.wire.shm.memory.barrier import HEADER_NBYTES, Barrier, RankHeaders
from shoal.wire.shm.memory.buffers import ALIGN, TURNS, Slots
from shoal.wire.shm.memory.cma import CmaReader, Token, can_read
from shoal.wire.shm.memory.peers import NodeRendezvous, Peer, host_key, read_all, this_process
from shoal.wire.shm.memory.ring import CELLS, Ring, ring_nbytes
from shoal.wire.shm.memory.segment import Segment
from shoal.wire.shm.multinode import GlooP2P, MultiNodeCollectives
from shoal.wire.shm.node.collectives import NodeCollectives
from shoal.wire.shm.node.p2p import P2P
from shoal.wire.shm.options import NEVER, SEGMENT_MB, direct_nbytes, segment_limit_nbytes

log = logging.getLogger(__name__)
_SLOT_NBYTES = 4 << 20
_CELL_NBYTES = 256 << 10
_RINGS_NBYTES = 32 << 20
# A rank cannot map the segment, or can map it, or can also read the memory of other ranks.
_UNMAPPED, _MAPPED, _READS = "0", "1", "2"


class Transports(NamedTuple):
    """The objects that run a group's collectives and messages, and the barrier of this node."""

    collectives: NodeCollectives | MultiNodeCollectives
    p2p: P2P | GlooP2P
    barrier: Barrier


class SegmentLayout(NamedTuple):
    """The layout of a segment for ``size`` ranks. All offsets are in bytes."""

    size: int
    slot_nbytes: int
    cell_nbytes: int

    @property
    def slots(self) -> int:
        """The offset of the slots."""
        return segments.round_to_pages(self.size * HEADER_NBYTES)

    @property
    def rings(self) -> int:
        """The offset of the rings."""
        return self.slots + TURNS * self.size * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """The size of the whole segment in bytes."""
        return self.rings + self.size**2 * ring_nbytes(self.cell_nbytes)

    def ring(self, sender: int, receiver: int) -> int:
        """Return the offset of the ring from one rank to another."""
        return self.rings + (sender * self.size + receiver) * ring_nbytes(self.cell_nbytes)


class NodeSetup(NamedTuple):
    """The segment that this rank shares with the other ranks of its node, and the group's nodes."""

    segment: Segment
    layout: SegmentLayout
    headers: RankHeaders
    least_nbytes: int  # messages of at least this size are read from the sender's memory
    nodes: tuple[tuple[int, ...], ...]  # the ranks of each node of the group, ascending


def segment_layout(size: int, limit_nbytes: int) -> SegmentLayout:
    """Return a layout within the limit. Slots and cells are halved until the layout fits.

    Raises:
        BadArgument: the limit is too small for ``size`` ranks.
    """
    # There are size**2 rings, and most are unused, so all cells get about _RINGS_NBYTES at most.
    most = _RINGS_NBYTES // (CELLS * size**2) // ALIGN * ALIGN
    slot, cell = _SLOT_NBYTES, max(min(_CELL_NBYTES, most), ALIGN)
    while (layout := SegmentLayout(size, slot, cell)).nbytes > limit_nbytes:
        slot, cell = slot // 2, max(cell // 2, ALIGN)
        if slot < 32 * ALIGN * size:
            raise BadArgument(
                f"{SEGMENT_MB}={limit_nbytes / 2**20:.3g}",
                f"this limit (or a quarter of the available memory) is too small for {size} ranks, "
                f"which need at least {layout.nbytes / 2**20:.2g} MB",
            )
    return layout


def connect(rendezvous: NodeRendezvous) -> Transports:
    """Connect to the other ranks of the group. All ranks must call this function."""
    segment, layout, headers, least_nbytes, nodes = _set_up_node(rendezvous)
    rank, size = headers.rank, headers.size
    barrier = Barrier(headers, rendezvous.seconds)
    reader = CmaReader(barrier, least_nbytes)

    def ring(sender: int, receiver: int) -> Ring | None:
        if sender == receiver:
            return None
        start, other = layout.ring(sender, receiver), receiver if sender == rank else sender
        return Ring(segment, start, cell_nbytes=layout.cell_nbytes, headers=headers, other=other)

    slots = Slots(segment, layout.slots, nbytes=layout.slot_nbytes, rank=rank, size=size)
    outgoing = [ring(rank, other) for other in range(size)]
    incoming = [ring(other, rank) for other in range(size)]
    collectives = NodeCollectives(barrier, slots, reader)
    if len(nodes) == 1:
        return Transports(collectives, P2P(barrier, outgoing, incoming, reader), barrier)
    if rendezvous.rank == 0:
        log.info("the group has %d ranks on %d nodes", len(rendezvous.names), len(nodes))
    multinode = MultiNodeCollectives(collectives, nodes, rendezvous)
    return Transports(multinode, GlooP2P(multinode.all_ranks, rendezvous.names), barrier)


class _PeerInfo(NamedTuple):
    """What each rank writes to the store, as a JSON list of these fields in this order."""

    host_key: str
    pid: int
    started: int
    token: Any
    direct_nbytes: int
    limit_nbytes: int


def _set_up_node(rendezvous: NodeRendezvous) -> NodeSetup:
    """Find the ranks of this node, and create or map a segment that they share."""
    store, rank, size = rendezvous.store, rendezvous.rank, len(rendezvous.names)
    token, limits = Token(), (direct_nbytes(), segment_limit_nbytes())
    own = _PeerInfo(host_key(), *this_process(), token.card, *limits)
    store.set(f"peer/{rank}", json.dumps(own))
    texts = read_all(store, [f"peer/{r}" for r in range(size)])
    infos = [_PeerInfo(*json.loads(text)) for text in texts]
    same_host = [r for r in range(size) if infos[r].host_key == own.host_key]
    reads = all(can_read(infos[r].pid, infos[r].token) for r in same_host if r != rank)
    layout = segment_layout(len(same_host), min(infos[r].limit_nbytes for r in same_host))
    access = _READS if reads else _MAPPED
    segment, layout = _share_segment(store, rank, same_host, layout, access=access)
    accesses = [text.decode() for text in read_all(store, [f"mapped/{r}" for r in range(size)])]
    del token  # no rank reads the token any more
    nodes = _group_by_node([info.host_key for info in infos], accesses)
    node = next(ranks for ranks in nodes if rank in ranks)
    if segment is None:
        layout = segment_layout(1, own.limit_nbytes)
        with closing(segments.create(layout.nbytes)) as offer:
            segment = offer.map()
    peers = [Peer(infos[r].pid, infos[r].started) for r in node]
    names = [rendezvous.names[r] for r in node]
    headers = RankHeaders(segment, node.index(rank), peers=peers, names=names)
    all_read = all(accesses[r] == _READS for r in node)
    least = max(infos[r].direct_nbytes for r in node) if all_read else NEVER
    return NodeSetup(segment, layout._replace(size=len(node)), headers, least, nodes)


def _share_segment(
    store: Store, rank: int, same_host: Sequence[int], layout: SegmentLayout, *, access: str
) -> tuple[Segment | None, SegmentLayout]:
    """Create or map the segment (None if this rank cannot map it), and return it with its layout.

    ``same_host`` are the ranks with the same host key, and the first of these creates the segment.
    ``access`` is written to the store for the other ranks. All ranks have computed the layout with
    the same limit, so if the limit was too small, all ranks have raised before this call and none
    waits here.
    """
    if same_host[0] == rank:
        with closing(segments.create(layout.nbytes)) as offer:
            segment = offer.map()
            store.set(f"segment/{rank}", json.dumps([offer.path, offer.nbytes, *layout]))
            store.set(f"mapped/{rank}", access)
            read_all(store, [f"mapped/{r}" for r in same_host])
        return segment, layout
    path, nbytes, *fields = json.loads(store.get(f"segment/{same_host[0]}"))
    try:
        mapped: Segment | None = segments.map_from(path, nbytes)
    except OSError:
        mapped = None
    store.set(f"mapped/{rank}", _UNMAPPED if mapped is None else access)
    return mapped, SegmentLayout(*fields)


def _group_by_node(keys: Sequence[str], accesses: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Group ranks with the same key into a node. A rank without the segment is its own node."""
    nodes: dict[str, list[int]] = {}
    for rank, (key, access) in enumerate(zip(keys, accesses, strict=True)):
        nodes.setdefault(key if access != _UNMAPPED else f"rank {rank}", []).append(rank)
    return tuple(tuple(ranks) for ranks in nodes.values())
