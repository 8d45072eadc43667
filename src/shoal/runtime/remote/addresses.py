"""Connect processes of a run over TCP. They publish their addresses in torch's TCPStore."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from shoal.errors import ExchangeTimeout, PeerLost
from shoal.runtime.world.interfaces import own_address
from shoal.runtime.world.world import World
from shoal.wire.channel import Channel, Hello, accept_loop, connect, listen

JOIN_SECONDS = 120.0  # how long to wait until an address is published
POLL_SECONDS = 0.02


def store_of(world: World) -> Store:
    """Return the TCPStore of the run, or raise PeerLost if this process has none."""
    if world.store is None:
        raise PeerLost("this process has no TCPStore, through which it could find other processes")
    return world.store


def serve_clients(world: World, key: str, handle: Callable[[Channel, int], None]) -> socket.socket:
    """Publish a listening socket under ``key``. A thread calls ``handle`` for each client."""
    local = world.env.local_size >= world.env.workers
    listener = listen(local)
    host = "127.0.0.1" if local else own_address(os.environ.get("MASTER_ADDR", ""))
    store_of(world).set(key, f"{host}:{listener.getsockname()[1]}")
    credentials = {"token": world.env.token, "generation": world.env.generation}
    threading.Thread(
        target=accept_loop, args=(listener, handle), kwargs=credentials, daemon=True
    ).start()
    return listener


def connect_to(world: World, key: str, peer: str) -> Channel:
    """Connect to the address under ``key`` once it is published. Errors name ``peer``."""
    store = store_of(world)
    if world.missing_keys(store, [key], JOIN_SECONDS):
        raise ExchangeTimeout(f"{peer} did not publish its address within {JOIN_SECONDS:g} s")
    host, _, port = store.get(key).decode().rpartition(":")
    hello = Hello(world.env.token, world.env.generation, world.rank)
    return connect(host, int(port), hello=hello, peer=peer, seconds=world.seconds)
