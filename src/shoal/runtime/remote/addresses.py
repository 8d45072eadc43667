"""Publish and look up the addresses of listening sockets, in torch's TCPStore."""

from __future__ import annotations

import os
import socket
import time

from torch._C._distributed_c10d import Store

from shoal.errors import ExchangeTimeout, PeerLost
from shoal.runtime.world.interfaces import own_address
from shoal.runtime.world.world import World

JOIN_SECONDS = 120.0
POLL_SECONDS = 0.02


def store_of(world: World) -> Store:
    """Return torch's key-value store; raise PeerLost if this process has none."""
    if world.store is None:
        raise PeerLost("this process has no TCPStore, through which workers find each other")
    return world.store


def publish(world: World, key: str, listener: socket.socket) -> None:
    """Store the address of a listening socket under ``key``."""
    local = world.local_size >= world.workers
    host = "127.0.0.1" if local else own_address(os.environ.get("MASTER_ADDR", ""))
    store_of(world).set(key, f"{host}:{listener.getsockname()[1]}")


def find(world: World, key: str) -> tuple[str, int]:
    """Wait until an address is published under ``key``, and return its host and port."""
    store = store_of(world)
    end = time.monotonic() + JOIN_SECONDS
    while not store.check([key]):
        if time.monotonic() > end:
            raise ExchangeTimeout(f"{key} did not publish its address within {JOIN_SECONDS:g} s")
        if world.watcher is not None and (failure := world.watcher.fetch_failure()) is not None:
            raise failure.as_error()
        time.sleep(POLL_SECONDS)
    host, _, port = store.get(key).decode().rpartition(":")
    return host, int(port)
