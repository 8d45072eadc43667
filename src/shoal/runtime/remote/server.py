"""The server's process: it runs the user's script up to ``distribute``, then serves until all left.

With bsp it sums (:class:`ReduceService`); with ssp or asp it holds the model and the optimizer
(:class:`ServerModel`), which the script has just built: nothing needs to be sent as code.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.tree import flatten, unflatten
from shoal.errors import ExchangeTimeout, FaultError, PeerLost, UsageError
from shoal.runtime.loss import plain
from shoal.runtime.remote.model_store import Clocks, ServerModel
from shoal.runtime.remote.reduce_service import ReduceService
from shoal.runtime.resume.state import load_optimizer, optimizer_state
from shoal.runtime.world.interfaces import own_address
from shoal.runtime.world.world import World
from shoal.strategy import Strategy
from shoal.wire.channel import Channel, Message, listen, shut, welcome

Reply = tuple[str, dict[str, Any], list[Tensor]]
ENDS = ("bye", "gone")
PATIENCE = 0.8  # of the workers' own: they shall hear from the server who is missing


class Service:
    """Answers workers, a thread each.

    Args:
        world: this server's place.
        strategy: what the workers do.
        model: the script's own.
        optimizer: the script's own.
    """

    def __init__(
        self, world: World, strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        add = strategy.compression.add or _refuse
        self.world = world
        self.all = {plain(n): p for n, p in model.named_parameters()}
        self.named = {name: p for name, p in self.all.items() if p.requires_grad}
        self.sums = ReduceService(world.workers, add, seconds=PATIENCE * world.seconds)
        self.store = ServerModel(self.named, optimizer, add=add, workers=world.workers)
        self.clocks = Clocks(range(world.workers), strategy.synchrony.staleness)
        self._changed = threading.Condition()
        self._begun = False
        self._here: set[int] = set()
        self._left: set[int] = set()
        self._lost: PeerLost | None = None
        self._handlers: dict[str, Callable[[int, Message], Reply]] = {
            "ask": self._ask,
            "begin": self._begin,
            "push": self._push,
            "pull": self._pull,
            "state": self._state,
            "load": self._load,
        }

    def serve(self) -> None:
        """Take in every worker once, and return when the last has left or one is lost."""
        listener = listen(self.world.local_size >= self.world.workers)
        publish(self.world, f"server/{self.world.rank}", listener)
        ours = {"token": self.world.token, "generation": self.world.generation}
        door = threading.Thread(
            target=welcome, args=(listener, self._attend), kwargs=ours, daemon=True
        )
        door.start()
        with self._changed:
            self._changed.wait_for(self._over)
        shut(listener)

    def _over(self) -> bool:
        all_came = len(self._left) == self.world.workers
        return not self._here and (all_came or self._lost is not None)

    def _attend(self, channel: Channel, worker: int) -> None:
        """Answer one message after the other; another thread reads ahead.

        A worker sends its next ask before it reads the answer to the last: if nobody read
        meanwhile, both sides would wait for room to write.
        """
        if not self._enter(worker):
            channel.close()
            return
        inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(channel, worker, inbox), daemon=True).start()
        with suppress(FaultError):
            while (message := inbox.get()).kind not in ENDS:
                self._reply(channel, worker, message)
        channel.close()
        with self._changed:
            self.clocks.leave(worker)
            self._here.discard(worker)
            self._left.add(worker)
            self._changed.notify_all()

    def _enter(self, worker: int) -> bool:
        """Whether this worker is one of ours, and comes for the first time."""
        with self._changed:
            known = 0 <= worker < self.world.workers
            if not known or worker in self._here or worker in self._left:
                return False
            self._here.add(worker)
            return True

    def _read(self, channel: Channel, worker: int, inbox: queue.SimpleQueue[Message]) -> None:
        kind = ""
        try:
            while kind not in ENDS:
                message = channel.receive()
                kind = message.kind
                inbox.put(message)
            self.sums.lose(worker, "has left the run")
        except FaultError:
            self.sums.lose(worker, "is gone")
            with self._changed:
                self._lost = PeerLost(f"rank {worker} is gone")
                self._changed.notify_all()
            inbox.put(Message("gone", {}, []))

    def _reply(self, channel: Channel, worker: int, message: Message) -> None:
        try:
            kind, facts, tensors = self._handlers[message.kind](worker, message)
        except Exception as error:  # whatever it is, the worker must hear of it and not wait
            kind, tensors = "error", []
            facts = {"type": type(error).__name__, "text": str(error)}
        channel.send(kind, {**facts, "round": message.facts.get("round", 0)}, tensors)

    def _ask(self, worker: int, message: Message) -> Reply:
        facts = message.facts
        return "told", {}, self.sums.offer(worker, facts["round"], facts["spec"], message.tensors)

    @torch.no_grad()
    def _begin(self, worker: int, message: Message) -> Reply:
        with self._changed:
            for name, value in zip(message.facts["names"], message.tensors, strict=True):
                self.named[name].copy_(value)
            self._begun = True
            self._changed.notify_all()
        return "begun", {}, []

    def _push(self, worker: int, message: Message) -> Reply:
        left = list(message.tensors)
        parts = {
            name: tuple(left.pop(0) for _ in range(count))
            for name, count in message.facts["parts"].items()
        }
        with self._changed:
            self._until(lambda: self._begun)
            self.store.retune(message.facts["groups"])
            self.store.push(parts)
            self.clocks.tick(worker)
            self._changed.notify_all()
            self._until(lambda: self.clocks.may_go(worker))
            return self._model(message.facts["names"])

    def _until(self, ready: Callable[[], bool]) -> None:
        """Wait, but not for the dead, and not for ever."""
        seconds = PATIENCE * self.world.seconds
        self._changed.wait_for(lambda: ready() or self._lost is not None, seconds)
        if self._lost is not None:
            raise self._lost
        if not ready():
            slowest = min(self.clocks.at, key=lambda worker: self.clocks.at[worker])
            raise ExchangeTimeout(f"the server waited {seconds:g} s for rank {slowest}")

    def _pull(self, worker: int, message: Message) -> Reply:
        with self._changed:
            self._until(lambda: self._begun)
            return self._model(message.facts["names"])

    def _state(self, worker: int, message: Message) -> Reply:
        """What the optimizer remembers of the parameters that live here, for a checkpoint."""
        with self._changed:
            tree, tensors = flatten(optimizer_state(self.store.optimizer, self.all), "optimizer")
            copies = [t.detach().clone() for t in tensors.values()]
        return "state", {"tree": tree, "names": list(tensors)}, copies

    def _load(self, worker: int, message: Message) -> Reply:
        given = dict(zip(message.facts["names"], message.tensors, strict=True))
        state = unflatten(message.facts["tree"], given.__getitem__)
        with self._changed:
            load_optimizer(self.store.optimizer, self.all, state)
        return "loaded", {}, []

    def _model(self, names: list[str]) -> Reply:
        model = self.store.model()
        return "model", {"names": names}, [model[name].clone() for name in names]


def serve(
    world: World,
    strategy: Strategy,
    models: Mapping[str, tuple[nn.Module, torch.optim.Optimizer]],
) -> None:
    """Be a server until every worker has left."""
    (model, optimizer), *_ = models.values()
    torch.set_num_threads(1)
    Service(world, strategy, model, optimizer).serve()


def publish(world: World, key: str, listener: socket.socket) -> None:
    """Tell where I listen."""
    if world.store is None:
        raise PeerLost("there is no store to meet at")
    local = world.local_size >= world.workers
    host = "127.0.0.1" if local else own_address(os.environ.get("MASTER_ADDR", ""))
    world.store.set(key, f"{host}:{listener.getsockname()[1]}")


def _refuse(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    raise UsageError("this compressor's messages cannot be decoded by a server; use topk or cast")
