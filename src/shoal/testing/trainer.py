"""Train a model on n workers in one process, in lockstep, if the strategy does not cut the model.

>>> from shoal.strategy import parse
>>> trainer = LockstepTrainer(parse("all_reduce, bsp"), workers=2, build=tiny)
>>> round(trainer.train(digits(8), steps=3), 3) < round(trainer.first, 3)
True
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.flow import Ask, Pair, Push, drive
from shoal.runtime.context import RunContext
from shoal.runtime.remote.model_store import Clocks, ServerModel
from shoal.runtime.settings import Settings
from shoal.runtime.step.model import ReplicatedModel
from shoal.runtime.step.modes import Mode, ModeSetup, choose
from shoal.runtime.world.env import RankEnv
from shoal.runtime.world.world import World
from shoal.strategy import Strategy
from shoal.testing.lockstep import lockstep
from shoal.timeline.record import NullRecorder
from shoal.wire.null import NullWire
from shoal.wire.wire import TracedWire

Batch = tuple[Tensor, Tensor]
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


class LockstepWorker(NamedTuple):
    """One worker with its model, its optimizer, and the mode that exchanges its messages."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mode: Mode

    @classmethod
    def build(
        cls, model: nn.Module, optimizer: torch.optim.Optimizer, context: RunContext
    ) -> LockstepWorker:
        """Return a worker with the mode of the context's strategy."""
        wire = TracedWire(NullWire(), context.recorder)
        setup = ModeSetup(ReplicatedModel(model), optimizer, wire, context, timed=False)
        mode = choose(context.strategy, overlaps=False)(setup)
        return cls(model, optimizer, mode)

    def backward(self, batch: Batch, scale: float) -> float:
        """Compute the gradients of ``scale`` * mean loss. Return the unscaled sum of losses."""
        self.optimizer.zero_grad(set_to_none=True)
        if len(batch[0]) == 0:
            return 0.0
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()) * len(batch[0])


def lockstep_context(strategy: Strategy, worker: int, workers: int) -> RunContext:
    """Return the run context of one lockstep worker, which has no process group."""
    world = World(RankEnv(worker, workers), torch.device("cpu"), "none")
    return RunContext(world, strategy, Settings(), NullRecorder(worker))


class LockstepTrainer:
    """Several workers in one process that train one model with a strategy.

    Args:
        strategy: the strategy.
        workers: the number of workers.
        build: returns a new model and optimizer; all workers start from the same weights.
    """

    def __init__(self, strategy: Strategy, *, workers: int, build: Build) -> None:
        self.strategy = strategy
        initial, _ = build()
        self.workers = []
        for worker in range(workers):
            model, optimizer = build()
            model.load_state_dict(copy.deepcopy(initial.state_dict()))
            context = lockstep_context(strategy, worker, workers)
            self.workers.append(LockstepWorker.build(model, optimizer, context))
        self.first = float("nan")

    def scatter(self) -> None:
        """Add different noise to each worker's parameters, in place, so that all models differ."""
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for worker in self.workers:
                for p in worker.model.parameters():
                    p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))

    def models(self) -> Tensor:
        """Return the parameters of all workers, of shape (workers, parameters)."""
        flat = [nn.utils.parameters_to_vector(w.model.parameters()) for w in self.workers]
        return torch.stack(flat).detach()

    def train(self, batches: Sequence[Batch], *, steps: int) -> float:
        """Train each worker for ``steps`` steps, and return the mean loss of the last step.

        If workers wait, the last step uses a whole batch. Otherwise it uses one worker's share.
        """
        if self.strategy.synchrony.waits:
            losses = [self.step(batches[k % len(batches)]) for k in range(steps)]
        else:
            losses = self._race(batches, steps)
        self.first = losses[0]
        return losses[-1]

    def step(self, batch: Batch) -> float:
        """Train all workers for one step on a global batch, and return the mean loss over it."""
        n, total = len(self.workers), len(batch[0])
        shares = list(zip(*(t.tensor_split(n) for t in batch), strict=True))
        mixing = self.strategy.coordination.mixing(n, 0)
        for opened in zip(*(worker.mode.opening() for worker in self.workers), strict=True):
            lockstep(opened, mixing)
        loss = 0.0
        for worker, (x, y) in zip(self.workers, shares, strict=True):
            loss += worker.backward((x, y), scale=n * len(x) / total)
        lockstep([worker.mode.averaging() for worker in self.workers], once=True)
        lockstep([w.mode.closing(w.optimizer.step) for w in self.workers], mixing)
        return loss / total

    def _race(self, batches: Sequence[Batch], steps: int) -> list[float]:
        """Run steps of workers in a random order that the synchrony allows. Return all losses."""
        n = len(self.workers)
        clocks = Clocks(range(n), self.strategy.synchrony.staleness)
        server = self._server(n)
        left = dict.fromkeys(range(n), steps)
        generator = random.Random(0)
        losses = []
        while ready := [i for i in left if clocks.may_go(i)]:
            i = generator.choice(ready)
            batch = batches[(steps - left[i]) % len(batches)]
            x, y = (t.tensor_split(n)[i] for t in batch)
            worker = self.workers[i]
            losses.append(worker.backward((x, y), scale=1.0) / len(x))
            drive(worker.mode.closing(worker.optimizer.step), lambda ask: self._answer(ask, server))
            clocks.tick(i)
            left[i] -= 1
            if not left[i]:
                del left[i]
                clocks.leave(i)
        return losses

    def _server(self, workers: int) -> ServerModel:
        add = self.strategy.compression.add
        model, optimizer = copy.deepcopy((self.workers[0].model, self.workers[0].optimizer))
        names = dict(model.named_parameters())
        if add is None:
            raise AssertionError(f"{self.strategy.compression} cannot be decoded by a server")
        return ServerModel(names, optimizer, add=add, workers=workers)

    def _answer(self, ask: Ask, server: ServerModel) -> Any:
        match ask:
            case Push(parts):
                server.push(parts)
                return server.model()
            case Pair(peer, parts):
                return self._meet(peer, parts)
            case other:
                raise AssertionError(f"a race cannot answer {other!r}")

    @torch.no_grad()
    def _meet(self, peer: int, parts: Sequence[Tensor]) -> list[Tensor]:
        means = []
        for p, part in zip(self.workers[peer].model.parameters(), parts, strict=True):
            p.copy_((p + part) / 2)
            means.append(p.detach().clone())
        return means

    def parameters(self, worker: int = 0) -> dict[str, Tensor]:
        """Return copies of one worker's parameters, by name."""
        named = self.workers[worker].model.named_parameters()
        return {name: p.detach().clone() for name, p in named}


def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small classifier in float64 and its optimizer, with the same weights every time."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def digits(samples: int, batches: int = 1) -> list[Batch]:
    """Return batches of random points in four separable classes, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    made = []
    for _ in range(batches):
        y = torch.arange(samples) % 4
        noise = torch.randn(samples, 12, generator=generator, dtype=torch.float64)
        made.append((centres[y] + 0.3 * noise, y))
    return made
