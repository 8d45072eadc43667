"""A server process runs the user's script up to ``distribute``, then serves until all leave.

With bsp it averages (:class:`ReduceService`). With ssp or asp it uses the model and the optimizer
that the script has just built (:class:`ServerModel`), so no code is sent to it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.tree import flatten, unflatten
from shoal.errors import ExchangeTimeout, FaultError, PeerLost, UsageError
from shoal.runtime.loss import plain
from shoal.runtime.remote.addresses import serve_clients
from shoal.runtime.remote.model_store import Clocks, ServerModel
from shoal.runtime.remote.reduce_service import ReduceService
from shoal.runtime.resume.state import load_optimizer, optimizer_state
from shoal.runtime.world.world import World
from shoal.strategy import Strategy
from shoal.wire.channel import Channel, Message, close_listener

Reply = tuple[str, dict[str, Any], list[Tensor]]
ENDS = ("bye", "gone")  # say that a worker leaves, or that its connection broke
PATIENCE = 0.8  # share of the workers' timeout, so that the server's error comes first


class ParameterServer:
    """Answers the messages of all workers, with two threads for each worker."""

    def __init__(
        self, world: World, strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        add = strategy.compression.add or _refuse
        self.world, self.workers = world, world.env.workers
        self.parameters = {plain(n): p for n, p in model.named_parameters()}
        trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.sums = ReduceService(self.workers, add, seconds=PATIENCE * world.seconds)
        self.model = ServerModel(trainable, optimizer, add=add, workers=self.workers)
        self.clocks = Clocks(range(self.workers), strategy.synchrony.staleness)
        self._changed = threading.Condition()
        self._begun = False  # rank 0 has sent the initial model
        self._connected: set[int] = set()
        self._gone: set[int] = set()  # workers that have left or lost their connection
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
        """Serve until no worker is connected, and either all have left or one was lost."""
        listener = serve_clients(self.world, f"server/{self.world.rank}", self._handle)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._connected and (len(self._gone) == self.workers or self._lost)
            )
        close_listener(listener)

    def _handle(self, channel: Channel, worker: int) -> None:
        """Answer a worker's messages one after the other, while another thread reads ahead.

        A worker may send its next message before it reads the last answer. Without the second
        thread both sides could block in a send, when the buffers of the sockets are full.
        """
        if not self._admit(worker):
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
            self._connected.discard(worker)
            self._gone.add(worker)
            self._changed.notify_all()

    def _admit(self, worker: int) -> bool:
        """Return whether a rank is valid and connects for the first time. If so, record it."""
        with self._changed:
            known = 0 <= worker < self.workers
            if not known or worker in self._connected or worker in self._gone:
                return False
            self._connected.add(worker)
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
            self.sums.lose(worker)
            with self._changed:
                self._lost = PeerLost(f"the connection to rank {worker} failed in the run")
                self._changed.notify_all()
            inbox.put(Message("gone", {}, []))

    def _reply(self, channel: Channel, worker: int, message: Message) -> None:
        try:
            kind, facts, tensors = self._handlers[message.kind](worker, message)
        except Exception as error:  # the worker must get every error, or it would wait in vain
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
                self.model.parameters[name].copy_(value)
            self._begun = True
            self._changed.notify_all()
        return "begun", {}, []

    def _push(self, worker: int, message: Message) -> Reply:
        tensors = iter(message.tensors)
        parts = {
            name: tuple(next(tensors) for _ in range(count))
            for name, count in message.facts["parts"].items()
        }
        with self._changed:
            self._wait_for(lambda: self._begun)
            self.model.retune(message.facts["groups"])
            self.model.push(parts)
            self.clocks.tick(worker)
            self._changed.notify_all()
            self._wait_for(lambda: self.clocks.may_go(worker))
            return self._model(message.facts["names"])

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()`` is true. Raise if a worker is lost, or after the timeout."""
        seconds = PATIENCE * self.world.seconds
        self._changed.wait_for(lambda: ready() or self._lost is not None, seconds)
        if self._lost is not None:
            raise self._lost
        if not ready():
            slowest = min(self.clocks.steps, key=lambda worker: self.clocks.steps[worker])
            raise ExchangeTimeout(f"the server waited {seconds:g} s for rank {slowest}")

    def _pull(self, worker: int, message: Message) -> Reply:
        with self._changed:
            self._wait_for(lambda: self._begun)
            return self._model(message.facts["names"])

    def _state(self, worker: int, message: Message) -> Reply:
        """Return a copy of this server's optimizer state, for a checkpoint."""
        with self._changed:
            state = optimizer_state(self.model.optimizer, self.parameters)
            tree, tensors = flatten(state, "optimizer")
            copies = [t.detach().clone() for t in tensors.values()]
        return "state", {"tree": tree, "names": list(tensors)}, copies

    def _load(self, worker: int, message: Message) -> Reply:
        tensors = dict(zip(message.facts["names"], message.tensors, strict=True))
        state = unflatten(message.facts["tree"], tensors.__getitem__)
        with self._changed:
            load_optimizer(self.model.optimizer, self.parameters, state)
        return "loaded", {}, []

    def _model(self, names: list[str]) -> Reply:
        model = self.model.model()
        return "model", {"names": names}, [model[name].clone() for name in names]


def serve(
    world: World, strategy: Strategy, models: Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]
) -> None:
    """Serve the first of ``models`` until every worker has left, or one was lost."""
    (model, optimizer), *_ = models.values()
    torch.set_num_threads(1)
    ParameterServer(world, strategy, model, optimizer).serve()


def _refuse(parts: tuple[Tensor, ...], into: Tensor, weight: float) -> None:
    raise UsageError("a server cannot decode messages of this compressor; use topk or cast")
