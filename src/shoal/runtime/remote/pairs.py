"""Pairs of workers that average whenever one of them asks; nobody else waits (AD-PSGD)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import FaultError, LayoutMismatch, PeerLost, ShoalError, UsageError
from shoal.flow import Ask, Pair
from shoal.runtime.context import RunContext
from shoal.runtime.remote.client import find
from shoal.runtime.remote.server import publish
from shoal.wire.channel import Channel, Hello, connect, listen, shut, welcome
from shoal.wire.wire import Pending, Ready

LOOK_SECONDS = 0.02


class PairWire:
    """Asks a peer to move to our common mean, and moves when asked.

    The lock is held while I update; it is free while I wait for a peer, so that two workers that
    ask each other both get an answer.

    Args:
        parameters: mine, moved in place when a peer asks.
        context: whom I may meet.
    """

    blocks = True

    def __init__(self, parameters: Mapping[str, Tensor], context: RunContext) -> None:
        self.size = context.replica_index.workers
        self.lock = threading.Lock()
        self._parameters = list(parameters.values())
        self._team = context
        self._channels: dict[int, Channel] = {}
        self._visitors: list[Channel] = []
        self._lost: FaultError | None = None
        self._left = False
        self._place = self._turn()
        self._listener = listen(context.world.local_size >= context.world.size)
        publish(context.world, f"{self._place}/at/{context.world.rank}", self._listener)
        threading.Thread(target=self._serve, name="shoal-peers", daemon=True).start()
        # who ends without closing its run must still answer those that go on
        Finalize(None, self._see_off, exitpriority=20)

    def _turn(self) -> str:
        """Keys of this wire alone: a process may have several, one after or beside the other."""
        world = self._team.world
        if world.store is None:
            raise PeerLost("there is no store to meet at")
        return f"pairs/{world.store.add(f'pairs-of/{world.rank}', 1)}"

    def ask(self, ask: Ask) -> Pending:
        """Meet one peer. The caller holds the lock; it is free meanwhile."""
        if not isinstance(ask, Pair):
            raise UsageError(f"{type(ask).__name__}: pairs only meet")
        if self._lost is not None:
            raise self._lost
        self.lock.release()
        try:
            channel = self._channel(ask.peer)
            channel.send("meet", {}, ask.parts)
            return Ready(channel.receive().tensors)
        finally:
            self.lock.acquire()

    def _channel(self, peer: int) -> Channel:
        if peer not in self._channels:
            world = self._team.world
            host, port = find(world, f"{self._place}/at/{peer}")
            hello = Hello(world.token, world.generation, world.rank)
            self._channels[peer] = connect(
                host, port, hello=hello, peer=f"rank {peer}", seconds=world.seconds
            )
        return self._channels[peer]

    def _serve(self) -> None:
        world = self._team.world
        welcome(self._listener, self._attend, token=world.token, generation=world.generation)

    def _attend(self, channel: Channel, worker: int) -> None:
        self._visitors.append(channel)
        try:
            while True:
                theirs = channel.receive().tensors
                self._check(worker, theirs)
                channel.send("mean", {}, self._meet(theirs))
        except LayoutMismatch as error:
            self._lost = error
        except FaultError:
            if not self._done(worker):
                self._lost = PeerLost(f"rank {worker} is gone")
        channel.close()  # who waits for an answer hears that there will be none

    def _check(self, worker: int, theirs: list[Tensor]) -> None:
        mine = [tuple(p.shape) for p in self._parameters]
        told = [tuple(t.shape) for t in theirs]
        if mine != told:
            raise LayoutMismatch(
                f"rank {worker} came with {len(told)} tensors, such as {told[:1]}, but mine are "
                f"{len(mine)}, such as {mine[:1]}; every rank must train the same model"
            )

    def _done(self, worker: int) -> bool:
        store = self._team.world.store
        with suppress(dist.DistError, RuntimeError):  # the store goes with its host
            return store is not None and store.check([f"{self._place}/done/{worker}"])
        return False

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
        """Keep serving until every worker is done, or one is lost."""
        if self._left:
            return
        self._left = True
        world = self._team.world
        if world.store is not None:
            world.store.set(f"{self._place}/done/{world.rank}", "1")
        end = time.monotonic() + world.seconds
        while not all(map(self._done, range(world.size))) and time.monotonic() < end:
            world.raise_if_failed()
            if self._lost is not None:
                raise self._lost
            time.sleep(LOOK_SECONDS)
        self._hang_up()

    def _see_off(self) -> None:
        with suppress(ShoalError, dist.DistError, RuntimeError):
            self.leave()

    def _hang_up(self) -> None:
        shut(self._listener)
        for channel in (*self._channels.values(), *self._visitors):
            channel.close()
