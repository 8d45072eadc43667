"""The wire of AD-PSGD. A worker averages with one peer while all other workers go on."""

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
from shoal.runtime.remote.addresses import POLL_SECONDS, connect_to, serve_clients, store_of
from shoal.wire.channel import Channel, close_listener
from shoal.wire.wire import Pending, Ready


class PairWire:
    """Averages this worker's parameters with a peer's, and answers peers that ask for a mean.

    ``lock`` protects the parameters. The training thread holds it while it updates them, and
    ``ask`` releases it while it waits for the peer. So two workers that ask each other at the same
    time can both answer, and there is no deadlock::

        training thread     [update: lock]  ask: unlock, send, wait ...  [lock: update]
        thread of a peer                     [lock: parameters = mean, reply]
    """

    blocks = True

    def __init__(self, parameters: Mapping[str, Tensor], context: RunContext) -> None:
        self.size = context.replica_index.workers
        self.lock = threading.Lock()
        self._parameters = list(parameters.values())
        self._world = world = context.world
        self._channels: dict[int, Channel] = {}
        self._clients: list[Channel] = []
        self._error: FaultError | None = None  # an error in a thread, which the next ask raises
        self._left = False
        # each wire has its own prefix in the store, because a process may make several wires
        self._prefix = f"pairs/{store_of(world).add(f'pairs-of/{world.rank}', 1)}"
        self._listener = serve_clients(world, f"{self._prefix}/at/{world.rank}", self._handle)
        # answer peers at the end of the process even if the script does not close its run
        Finalize(None, self._leave_quietly, exitpriority=20)

    def ask(self, ask: Ask) -> Pending:
        """Return the mean with one peer. The caller holds ``lock``, which is freed meanwhile."""
        if not isinstance(ask, Pair):
            raise UsageError(f"a PairWire cannot answer {type(ask).__name__}, only Pair")
        if self._error is not None:
            raise self._error
        self.lock.release()
        try:
            if (peer := ask.peer) not in self._channels:
                key = f"{self._prefix}/at/{peer}"
                self._channels[peer] = connect_to(self._world, key, f"rank {peer}")
            self._channels[peer].send("meet", {}, ask.parts)
            return Ready(self._channels[peer].receive().tensors)
        finally:
            self.lock.acquire()

    def _handle(self, channel: Channel, worker: int) -> None:
        """Answer one peer until it leaves. Keep an error for the next ``ask`` to raise."""
        self._clients.append(channel)
        try:
            while True:
                theirs = channel.receive().tensors
                self._check(worker, theirs)
                channel.send("mean", {}, self._average(theirs))
        except LayoutMismatch as error:
            self._error = error
        except FaultError:
            if not self._done(worker):
                self._error = PeerLost(f"the connection to rank {worker} failed in the run")
        channel.close()  # a peer that waits for an answer then fails at once

    def _check(self, worker: int, theirs: list[Tensor]) -> None:
        own_shapes = [tuple(p.shape) for p in self._parameters]
        shapes = [tuple(t.shape) for t in theirs]
        if own_shapes != shapes:
            raise LayoutMismatch(
                f"rank {worker} sent {len(shapes)} tensors, such as {shapes[:1]}, but this rank "
                f"has {len(own_shapes)}, such as {own_shapes[:1]}; every rank must train the same "
                "model"
            )

    @torch.no_grad()
    def _average(self, theirs: list[Tensor]) -> list[Tensor]:
        """Set this worker's parameters to the mean with a peer's, and return copies of these."""
        means = []
        with self.lock:
            for p, other in zip(self._parameters, theirs, strict=True):
                value = p.data  # autograd must not see the change, as a forward may be running
                value.copy_((value + other.to(value)) / 2)
                means.append(value.clone())
        return means

    def _done(self, worker: int) -> bool:
        store = self._world.store
        with suppress(dist.DistError, RuntimeError):  # the host of the store may have ended
            return store is not None and store.check([f"{self._prefix}/done/{worker}"])
        return False

    def leave(self) -> None:
        """Answer peers until all workers have left or the timeout ends. Raise if a worker fails."""
        if self._left:
            return
        self._left = True
        world = self._world
        if world.store is not None:
            world.store.set(f"{self._prefix}/done/{world.rank}", "1")
        end = time.monotonic() + world.seconds
        while not all(map(self._done, range(world.size))) and time.monotonic() < end:
            world.raise_if_failed()
            if self._error is not None:
                raise self._error
            time.sleep(POLL_SECONDS)
        self._disconnect()

    def _leave_quietly(self) -> None:
        with suppress(ShoalError, dist.DistError, RuntimeError):
            self.leave()

    def _disconnect(self) -> None:
        close_listener(self._listener)
        for channel in (*self._channels.values(), *self._clients):
            channel.close()
