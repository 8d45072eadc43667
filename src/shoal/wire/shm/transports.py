"""Where a group is: on one host, all over shared memory; on several, over gloo between them."""

from __future__ import annotations

import logging
from typing import NamedTuple

from shoal.wire.shm.multinode import GlooPost, Hosts
from shoal.wire.shm.node.collectives import Host
from shoal.wire.shm.node.p2p import Post
from shoal.wire.shm.rendezvous import Meeting, connect

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """What carries a group's collectives, and its messages."""

    wire: Host | Hosts
    post: Post | GlooPost


def find_place(meeting: Meeting) -> Place:
    """Meet the other ranks, and find out what is between them."""
    room = connect(meeting)
    if len(room.nodes) == 1:
        return Place(room.host, room.post)
    if meeting.rank == 0:
        log.info("%d ranks on %d hosts", len(meeting.names), len(room.nodes))
    hosts = Hosts(room.host, room.nodes, meeting=meeting)
    return Place(hosts, GlooPost(hosts.everyone, meeting.names))
