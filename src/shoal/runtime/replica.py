"""One model and its optimizer, and how they come together with their copies elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal import rules
from shoal.flow import Rows, drive
from shoal.runtime.control import Asked, Table, Word, nowhere, tell
from shoal.runtime.early import EarlyUpdates
from shoal.runtime.engine import Engine
from shoal.runtime.line import Suspended
from shoal.runtime.modes import Mode, choose
from shoal.runtime.peers import PairWire
from shoal.runtime.source import Cut, Whole
from shoal.runtime.team import Team
from shoal.runtime.watch import Watched
from shoal.strategy import Strategy
from shoal.wire.pending import Wire
from shoal.wire.served import ServedWire


class Replica:
    """A model that is trained, the optimizer that trains it, and their part of each exchange.

    Args:
        source: the model, whole or cut.
        optimizer: over its parameters.
        team: who else trains it.
        wire: who answers.
    """

    def __init__(
        self, source: Whole | Cut, optimizer: torch.optim.Optimizer, *, team: Team, wire: Wire
    ) -> None:
        self.source = source
        self.model = source.model
        self.optimizer = optimizer
        self.team = team
        self.carrier = wire
        self.wire = Watched(wire, team.recorder)
        self.engine: Engine | None = None
        self.early: EarlyUpdates | None = None
        self._opened: list[Suspended] = []
        self.mode: Mode = self._plan()

    @property
    def pipeline(self) -> Any:
        """How the model runs where it is cut into stages; else None."""
        return self.source.pipeline

    def _plan(self) -> Mode:
        """Lay out what travels, from what is trainable now."""
        self._signature, team = self._sign(), self.team
        named = self.source.trainable()
        sparse = self._sparse()
        self.sparse = {name: p for name, p in named.items() if id(p) in sparse}
        self.parameters = {name: p for name, p in named.items() if id(p) not in sparse}
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._graded = [*{id(p): p for p in (*stepped, *self.source.model.parameters())}.values()]
        served = team.strategy.coordination.via == "server"
        # One worker is served by nobody: its own optimizer steps, as in a plain loop.
        asked = Strategy() if served and team.seat.workers == 1 else team.strategy
        mode = choose(asked, self.parameters, team.seat, self.source.collect)
        if isinstance(self.source, Whole) and mode.gradients and team.seat.workers > 1:
            self.engine = Engine(
                mode.gradients, self.wire, parameters=self.parameters, worker=team.seat.worker
            )
            if team.strategy.scheduling.early:
                self.early = EarlyUpdates(self.model, self.optimizer, self.engine)
        return mode

    def _sign(self) -> list[bool]:
        """What is trainable: a parameter that joins makes it longer, one frozen flips it."""
        return [p.requires_grad for group in self.optimizer.param_groups for p in group["params"]]

    def _sparse(self) -> set[int]:
        """Parameters whose gradients hold only the rows looked up, and travel as such."""
        s = self.team.strategy
        if not rules.can_overlap(s) or s.coordination.via != "collective":
            return set()
        looked_up = (nn.Embedding, nn.EmbeddingBag)
        found = [m for m in self.model.modules() if isinstance(m, looked_up) and m.sparse]
        return {id(m.weight) for m in found}

    def replan(self) -> None:
        """Lay out anew if parameters joined or were frozen; what is remembered stays."""
        if self._sign() == self._signature:
            return
        self.drain()
        state = self.mode.state_dict()
        self.close()
        self.mode = self._plan()
        if self.mode.gradients is not None:
            known = self.parameters
            kept = {k: v for k, v in state["states"].items() if k.partition("[")[0] in known}
            self.mode.load_state_dict({**state, "states": kept})

    def begin(self, step: int) -> None:
        """The step starts: send what may travel from here on."""
        self.wire.step = step
        self.replan()
        self._opened = [Suspended(flow, self.wire) for flow in self.mode.opening()]

    def arm(self, word: Word) -> None:
        """The last backward of the step comes next."""
        if self.early is not None:
            self.early.drain()
        if self.engine is not None and self.team.strategy.scheduling.overlaps:
            self.engine.arm(word)

    def agree(self, word: Word, step: int) -> Callable[[], Table] | None:
        """After backward: agree on gradients and on everybody's word; None where nobody waits.

        With early updates nothing is waited for: the table is there when it is asked for.
        """
        if self.team.seat.workers == 1 and self.team.world.size == 1:
            return None
        if not (self.team.strategy.synchrony.waits and self.mode.due()):
            return None
        unused = self._send(word)
        asked: list[Asked] = []
        word = word._replace(unused=len(unused))

        def say() -> None:
            asked.append(tell(word, None, self.team.world.size))

        if self.engine is None:
            say()
            return asked[0].wait
        if not self.engine.rides:
            self.engine.line.submit(say)  # behind the gradients, in one order on every rank
        if self.early is not None:
            self.early.defer(unused)
            return partial(_late, self.engine, asked)
        start = time.perf_counter()
        self.engine.settle()
        table = self.engine.table() if self.engine.rides else asked[0].wait()
        self.team.recorder.add("wait", "agree", start, time.perf_counter() - start, 0, step)
        self._agree_sparse()
        if table.unused:
            self._drop_absent(set(unused))
        return lambda: table

    def _send(self, word: Word) -> tuple[str, ...]:
        """Put the rest of the gradients on the wire; return whose never came."""
        if self.engine is not None:
            rest = self.engine.send_rest(word)
            return rest + tuple(n for n, p in self.sparse.items() if p.grad is None)
        if self.mode.gradients is not None and self.team.seat.workers > 1:
            self.source.collect(self.mode.gradients)
            for index in range(len(self.mode.gradients.tasks)):
                drive(self.mode.gradients.flow(index), lambda ask: self.wire.ask(ask).wait())
            self.source.deliver(self.mode.gradients)
        return ()

    def _drop_absent(self, unused: set[str]) -> None:
        """A parameter without a gradient anywhere keeps none: its momentum must not move it."""
        everything = {**self.parameters, **self.sparse}
        for name in nowhere(unused, list(everything), self.team.group):
            everything[name].grad = None

    def _agree_sparse(self) -> None:
        for p in self.sparse.values():
            grad = p.grad if p.grad is not None else _no_rows(p)
            p.grad = self.wire.ask(Rows(grad)).wait()

    def norm(self) -> float:
        """Norm of the gradient, the same on every worker that agreed on it."""
        return self.source.norm()

    def scale(self, factor: float) -> None:
        """Multiply the gradient."""
        for p in self._graded:
            if p.grad is not None:
                p.grad.mul_(factor)

    def clip(self, limit: float, norm: float) -> None:
        """Scale the gradient down to ``limit``."""
        self.source.clip(limit, norm)

    def update(self, apply: Callable[[], Any]) -> None:
        """End the step: update, and agree on parameters where that is due."""
        for suspended in self._opened:
            suspended.finish()
        self._opened = []
        if self.early is None:
            with self._alone():
                drive(self.mode.closing(apply), lambda ask: self.wire.ask(ask).wait())
            self.clear()
        else:
            self.early.learn()

    def _alone(self) -> AbstractContextManager[object]:
        """Where peers may move my parameters, they wait while I do."""
        return self.carrier.lock if isinstance(self.carrier, PairWire) else nullcontext()

    def clear(self) -> None:
        """Forget gradients; the next backward writes new ones into the same places."""
        for p in self._graded:
            p.grad = None

    def drain(self) -> None:
        """Finish what is pending, so that parameters may be read."""
        if self.early is not None:
            self.early.drain()

    @contextmanager
    @torch.no_grad()
    def agreed(self) -> Iterator[nn.Module]:
        """Inside, the model is what all agree on: parameters where replicas differ, buffers too."""
        self.drain()
        tensors = [b for b in self.model.buffers() if b.is_floating_point()]
        if not self.mode.agrees:
            tensors += list(self.source.trainable().values())
        if self.team.seat.workers == 1:
            tensors = []
        self._rest()
        before = [t.detach().clone() for t in tensors]
        if self._pull():  # all took the same: a mean would round
            taken = {t.data_ptr() for t in self.source.trainable().values()}
            differ = [t for t in tensors if t.data_ptr() not in taken]
        else:
            differ = tensors
        for tensor in differ:
            total = tensor.detach().clone()
            dist.all_reduce(total, group=self.team.group)
            tensor.copy_(total / self.team.seat.workers)
        try:
            yield self.model
        finally:
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)

    def _rest(self) -> None:
        """Where nobody waits for others, they do now: nobody pushes or meets any more."""
        if self.team.seat.workers > 1 and not self.team.strategy.synchrony.waits:
            dist.barrier()

    def _pull(self) -> bool:
        """Where a server holds the model that counts, everybody takes it."""
        if self.team.strategy.synchrony.waits or not isinstance(self.carrier, ServedWire):
            return False
        mine = self.source.trainable()
        for name, value in self.carrier.pull().items():
            mine[name].copy_(value)
        return True

    def leave(self) -> None:
        """The run is over: keep serving peers until they are done, then close."""
        self.close()
        self.wire.leave()

    def close(self) -> None:
        """Take hooks off and end threads."""
        if self.early is not None:
            self.early.close()
            self.early = None
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def _late(engine: Engine, asked: list[Asked]) -> Table:
    engine.line.join()
    return asked[0].wait()


def _no_rows(p: Tensor) -> Tensor:
    where = torch.zeros(1, 0, dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(where, p.new_zeros(0, *p.shape[1:]), p.shape)
