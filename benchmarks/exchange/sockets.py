"""Bytes that a process gave to the network, counted where it did: at its TCP sockets.

Linux keeps the count for every connection (``TCP_INFO``). It holds what was written and sent, once,
with a backend's own headers; those of TCP and IP, acknowledgements and what was sent again are not
in it, as they are in the count of the device. Connections to the store are left out.

References:
    tcp(7), ``struct tcp_info`` of linux/tcp.h; ``tcpi_bytes_sent`` is there since Linux 4.19.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shoal.runtime.world.interfaces import IFNAME

SENT_AT, SIZE = 200, 216  # of tcpi_bytes_sent, which tcpi_bytes_retrans follows
OPEN = Path("/proc/self/fd")
Counts = Mapping[int, int]
"""Bytes sent by connection, which its inode names."""


def counts() -> Counts:
    """Of every connection that this process has now."""
    found = {}
    store = int(os.environ.get("MASTER_PORT", "0"))
    for name in os.listdir(OPEN):
        with suppress(OSError):  # closed meanwhile, or no socket
            file = int(name)
            if not os.readlink(OPEN / name).startswith("socket:"):
                continue
            inode = os.fstat(file).st_ino
            sent = _sent(file, store)
            if sent is not None:
                found[inode] = sent
    return found


def _sent(file: int, store: int) -> int | None:
    with socket.socket(fileno=os.dup(file)) as each:
        if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
            return None
        if store in (each.getsockname()[1], each.getpeername()[1]):
            return None
        raw = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
    if len(raw) < SIZE:
        return None
    sent, again = struct.unpack_from("=QQ", raw, SENT_AT)
    return int(sent - again)


def since(before: Counts) -> int:
    """Bytes sent since ``before``, on the connections that are still there."""
    return sum(sent - before.get(inode, 0) for inode, sent in counts().items())


def device_nbytes() -> int:
    """Bytes this host's device has sent since it was made, all headers counted."""
    device = os.environ.get(IFNAME, "lo")
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())
