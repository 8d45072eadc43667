"""Pairs of workers that average whenever one of them asks; nobody else waits (AD-PSGD)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from shoal.errors import PeerLost, UsageError
from shoal.flow import Ask, Pair
from shoal.runtime.clients import find
from shoal.runtime.server import publish
from shoal.runtime.team import Team
from shoal.wire.channel import Channel, Hello, accept, connect, listen
from shoal.wire.pending import Pending, There

LOOK_SECONDS = 0.02


class PairWire:
    """Asks a peer to move to our common mean, and moves when asked.

    The lock is held while I update; it is free while I wait for a peer, so that two workers that
    ask each other both get an answer.

    Args:
        parameters: mine, moved in place when a peer asks.
        team: whom I may meet.
    """

    blocks = True

    def __init__(self, parameters: Mapping[str, Tensor], team: Team) -> None:
        self.size = team.seat.workers
        self.lock = threading.Lock()
        self._parameters = list(parameters.values())
        self._team = team
        self._channels: dict[int, Channel] = {}
        self._listener = listen(team.world.local_size >= team.world.size)
        publish(team.world, f"peer/{team.world.rank}", self._listener)
        threading.Thread(target=self._serve, name="shoal-peers", daemon=True).start()

    def ask(self, ask: Ask) -> Pending:
        """Meet one peer. The caller holds the lock; it is free meanwhile."""
        if not isinstance(ask, Pair):
            raise UsageError(f"{type(ask).__name__}: pairs only meet")
        self.lock.release()
        try:
            channel = self._channel(ask.peer)
            channel.send("meet", {}, ask.parts)
            return There(channel.receive().tensors)
        finally:
            self.lock.acquire()

    def _channel(self, peer: int) -> Channel:
        if peer not in self._channels:
            world = self._team.world
            host, port = find(world, f"peer/{peer}")
            hello = Hello(world.token, world.generation, world.rank)
            self._channels[peer] = connect(
                host, port, hello=hello, peer=f"rank {peer}", seconds=world.seconds
            )
        return self._channels[peer]

    def _serve(self) -> None:
        world = self._team.world
        with suppress(OSError):  # closed: the run is over
            while True:
                visit = accept(self._listener, token=world.token, generation=world.generation)
                if visit is not None:
                    threading.Thread(target=self._attend, args=visit, daemon=True).start()

    def _attend(self, channel: Channel, worker: int) -> None:
        with suppress(PeerLost):
            while True:
                channel.send("mean", {}, self._meet(channel.receive().tensors))

    @torch.no_grad()
    def _meet(self, theirs: list[Tensor]) -> list[Tensor]:
        means = []
        with self.lock:
            for p, other in zip(self._parameters, theirs, strict=True):
                value = p.data  # past autograd's version check: a forward may be under way
                value.copy_((value + other.to(value)) / 2)
                means.append(value.clone())
        return means

    def leave(self) -> None:
        """Keep serving until every worker is done."""
        world = self._team.world
        if world.store is not None:
            world.store.set(f"peer-done/{world.rank}", "1")
            keys = [f"peer-done/{rank}" for rank in range(world.size)]
            end = time.monotonic() + world.seconds
            while not world.store.check(keys) and time.monotonic() < end:
                time.sleep(LOOK_SECONDS)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in self._channels.values():
            channel.close()
