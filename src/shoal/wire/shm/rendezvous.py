"""How the ranks of a group find each other, and what carries their collectives and messages.

1. Each rank writes to the store which system it runs on and which process it is (``peers``).
2. The first rank of each system creates a segment; the others map it. A rank that cannot reach it,
   though it seems to be on the same system, becomes a node of its own. Each rank also tries to read
   the memory of the others (``cma``).
3. The file is closed: from now on the segment lives in the mappings alone.
4. Groups on several nodes also connect over gloo (``multinode``).

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
_UNMAPPED, _MAPPED, _READS = "0", "1", "2"  # whether a rank has the segment, and reads others


class Transports(NamedTuple):
    """What carries a group's collectives and messages, and the barrier of this node's ranks."""

    collectives: NodeCollectives | MultiNodeCollectives
    p2p: P2P | GlooP2P
    barrier: Barrier


class SegmentLayout(NamedTuple):
    """Offsets in the segment of ``size`` ranks."""

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
        """The size of the whole segment."""
        return self.rings + self.size**2 * ring_nbytes(self.cell_nbytes)

    def ring(self, sender: int, receiver: int) -> int:
        """Return the offset of the ring from one rank to another."""
        return self.rings + (sender * self.size + receiver) * ring_nbytes(self.cell_nbytes)


class NodeSetup(NamedTuple):
    """What this rank agreed on with the other ranks of its node."""

    segment: Segment
    layout: SegmentLayout
    headers: RankHeaders
    least_nbytes: int  # the smallest message that is read from another rank's memory
    nodes: tuple[tuple[int, ...], ...]  # all ranks of the group by node, each ascending


def segment_layout(size: int, limit_nbytes: int) -> SegmentLayout:
    """Return the layout with the largest slots and cells, up to the default, that fit the limit.

    Raises:
        BadArgument: the limit is too small for so many ranks.
    """
    rings = _RINGS_NBYTES // (CELLS * size**2) // ALIGN * ALIGN  # there are many, mostly unused
    slot, cell = _SLOT_NBYTES, max(min(_CELL_NBYTES, rings), ALIGN)
    while (layout := SegmentLayout(size, slot, cell)).nbytes > limit_nbytes:
        slot, cell = slot // 2, max(cell // 2, ALIGN)
        if slot < 32 * ALIGN * size:
            raise BadArgument(
                f"{SEGMENT_MB}={limit_nbytes / 2**20:.3g}",
                f"too small for {size} ranks, which need {layout.nbytes / 2**20:.2g} MB or more",
            )
    return layout


def connect(rendezvous: NodeRendezvous) -> Transports:
    """Meet the other ranks of the group, and set up what carries its collectives and messages."""
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
        log.info("%d ranks on %d nodes", len(rendezvous.names), len(nodes))
    multinode = MultiNodeCollectives(collectives, nodes, rendezvous)
    return Transports(multinode, GlooP2P(multinode.all_ranks, rendezvous.names), barrier)


class _PeerInfo(NamedTuple):
    """What each rank writes to the store, in this order, as JSON."""

    host_key: str
    pid: int
    started: int
    token: Any
    direct_nbytes: int
    limit_nbytes: int


def _set_up_node(rendezvous: NodeRendezvous) -> NodeSetup:
    """Find the ranks on this node, and share a segment with them."""
    store, rank, size = rendezvous.store, rendezvous.rank, len(rendezvous.names)
    token, limits = Token(), (direct_nbytes(), segment_limit_nbytes())
    own = _PeerInfo(host_key(), *this_process(), token.card, *limits)
    store.set(f"peer/{rank}", json.dumps(own))
    texts = read_all(store, [f"peer/{r}" for r in range(size)])
    infos = [_PeerInfo(*json.loads(text)) for text in texts]
    near = [r for r in range(size) if infos[r].host_key == own.host_key]
    reads = all(can_read(infos[r].pid, infos[r].token) for r in near if r != rank)
    layout = segment_layout(len(near), min(infos[r].limit_nbytes for r in near))
    reach = _READS if reads else _MAPPED
    segment, layout = _share_segment(store, rank, near, layout, reach=reach)
    reaches = [text.decode() for text in read_all(store, [f"mapped/{r}" for r in range(size)])]
    del token  # all ranks have tried to read it
    nodes = _group_by_node([info.host_key for info in infos], reaches)
    node = next(ranks for ranks in nodes if rank in ranks)
    if segment is None:
        layout = segment_layout(1, own.limit_nbytes)
        with closing(segments.create(layout.nbytes)) as offer:
            segment = offer.map()
    peers = [Peer(infos[r].pid, infos[r].started) for r in node]
    names = [rendezvous.names[r] for r in node]
    headers = RankHeaders(segment, node.index(rank), peers=peers, names=names)
    all_read = all(reaches[r] == _READS for r in node)
    least = max(infos[r].direct_nbytes for r in node) if all_read else NEVER
    return NodeSetup(segment, layout._replace(size=len(node)), headers, least, nodes)


def _share_segment(
    store: Store, rank: int, near: Sequence[int], layout: SegmentLayout, *, reach: str
) -> tuple[Segment | None, SegmentLayout]:
    """Create the segment or map it, and publish ``reach``; None if it cannot be mapped.

    The first of the near ranks creates it. All have planned with the same limit: if that is too
    small, the error was raised on every rank before this, and no rank waits for another.
    """
    if near[0] == rank:
        with closing(segments.create(layout.nbytes)) as offer:
            segment = offer.map()
            store.set(f"segment/{rank}", json.dumps([offer.path, offer.nbytes, *layout]))
            store.set(f"mapped/{rank}", reach)
            read_all(store, [f"mapped/{r}" for r in near])
        return segment, layout
    path, nbytes, *fields = json.loads(store.get(f"segment/{near[0]}"))
    try:
        mapped: Segment | None = segments.map_from(path, nbytes)
    except OSError:
        mapped = None
    store.set(f"mapped/{rank}", _UNMAPPED if mapped is None else reach)
    return mapped, SegmentLayout(*fields)


def _group_by_node(keys: Sequence[str], reaches: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return ranks by node: those of one system that mapped its segment; any other rank alone."""
    nodes: dict[str, list[int]] = {}
    for rank, (key, reach) in enumerate(zip(keys, reaches, strict=True)):
        nodes.setdefault(key if reach != _UNMAPPED else f"rank {rank}", []).append(rank)
    return tuple(tuple(ranks) for ranks in nodes.values())
