"""Bytes that this process has sent, counted at its TCP sockets.

Linux has a count for every connection (``TCP_INFO``). It contains what was written and sent, once,
with a backend's own headers. It does not contain the headers of TCP and IP, acknowledgements and
retransmissions, which the count of the network device does. Connections to the store are left out.

References:
    tcp(7), ``struct tcp_info`` of linux/tcp.h; ``tcpi_bytes_sent`` exists since Linux 4.19.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shoal.runtime.world.interfaces import IFNAME_VARIABLE

SENT_AT, SIZE = 200, 216  # offset of tcpi_bytes_sent; tcpi_bytes_retrans follows it
OPEN = Path("/proc/self/fd")
Counts = Mapping[int, int]
"""Inode of a connection -> bytes sent on it."""


def counts() -> Counts:
    """Return the bytes sent on every open connection of this process."""
    by_inode = {}
    store = int(os.environ.get("MASTER_PORT", "0"))
    for name in os.listdir(OPEN):
        with suppress(OSError):  # closed meanwhile, or not a socket
            file = int(name)
            if not os.readlink(OPEN / name).startswith("socket:"):
                continue
            inode = os.fstat(file).st_ino
            sent = _sent(file, store)
            if sent is not None:
                by_inode[inode] = sent
    return by_inode


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
    """Return the bytes sent since ``before``, on the connections that are still open."""
    return sum(sent - before.get(inode, 0) for inode, sent in counts().items())


def device_nbytes() -> int:
    """Return the bytes that this host's network device has sent, with all headers."""
    device = os.environ.get(IFNAME_VARIABLE, "lo")
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())
