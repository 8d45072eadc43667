"""Train a model on n workers in one process, in lockstep: what every legal strategy must do.

>>> from shoal.strategy import parse
>>> school = LockstepTrainer(parse("all_reduce, bsp"), workers=2, build=tiny)
>>> round(school.train(digits(8), steps=3), 3) < round(school.first, 3)
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
from shoal.runtime.remote.model_store import Clocks, ServerModel
from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.modes import Mode, ReplicaIndex, choose
from shoal.strategy import Strategy
from shoal.testing.lockstep import lockstep

Batch = tuple[Tensor, Tensor]
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


class LockstepWorker(NamedTuple):
    """One worker: its replica and its mode."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mode: Mode

    def backward(self, batch: Batch, scale: float) -> float:
        """Leave scaled gradients in the model; return the plain loss."""
        self.optimizer.zero_grad(set_to_none=True)
        if len(batch[0]) == 0:
            return 0.0
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()) * len(batch[0])

    def collect(self, agreement: Exchange) -> None:
        """Put the gradients where the agreement reads them."""
        for name, p in self.model.named_parameters():
            if name in agreement.flats.places:
                view = agreement.flats.places[name].view
                view.copy_(p.grad) if p.grad is not None else view.zero_()

    def deliver(self, agreement: Exchange) -> None:
        """Put the agreed gradients back into the model."""
        for name, p in self.model.named_parameters():
            if name in agreement.flats.places:
                p.grad = agreement.flats.places[name].view.clone()


class LockstepTrainer:
    """Workers that train one model in lockstep.

    Args:
        strategy: what they do.
        workers: how many.
        build: makes the model and optimizer; all start from the first one's weights.
    """

    def __init__(self, strategy: Strategy, *, workers: int, build: Build) -> None:
        self.strategy = strategy
        model, _ = build()
        self.fishes = [self._fish(model, build, ReplicaIndex(i, workers)) for i in range(workers)]
        self.first = float("nan")

    def _fish(self, source: nn.Module, build: Build, index: ReplicaIndex) -> LockstepWorker:
        model, optimizer = build()
        model.load_state_dict(copy.deepcopy(source.state_dict()))
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        box: list[LockstepWorker] = []
        mode = choose(self.strategy, parameters, index, lambda a: box[0].collect(a))
        box.append(LockstepWorker(model, optimizer, mode))
        return box[0]

    def scatter(self) -> None:
        """Let every worker start from another model."""
        chance = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for fish in self.fishes:
                for p in fish.model.parameters():
                    p.add_(torch.randn(p.shape, generator=chance, dtype=p.dtype))

    def models(self) -> Tensor:
        """All workers' parameters: (workers, numbers)."""
        flat = [nn.utils.parameters_to_vector(f.model.parameters()) for f in self.fishes]
        return torch.stack(flat).detach()

    def train(self, batches: Sequence[Batch], *, steps: int) -> float:
        """Train and return the last loss over the global batch."""
        if self.strategy.synchrony.waits:
            losses = [self.step(batches[k % len(batches)]) for k in range(steps)]
        else:
            losses = self._race(batches, steps)
        self.first = losses[0]
        return losses[-1]

    def step(self, batch: Batch) -> float:
        """One step of all workers on one global batch, cut fairly; returns the global mean loss."""
        n, total = len(self.fishes), len(batch[0])
        shares = list(zip(*(t.tensor_split(n) for t in batch), strict=True))
        mixing = self.strategy.coordination.mixing(n, 0)
        for opened in zip(*(fish.mode.opening() for fish in self.fishes), strict=True):
            lockstep(opened, mixing)
        loss = 0.0
        for fish, (x, y) in zip(self.fishes, shares, strict=True):
            loss += fish.backward((x, y), scale=n * len(x) / total)
        self._agree_on_gradients()
        lockstep([f.mode.closing(f.optimizer.step) for f in self.fishes], mixing)
        return loss / total

    def _agree_on_gradients(self) -> None:
        agreements = [(f, f.mode.gradients) for f in self.fishes if f.mode.gradients is not None]
        if not agreements:
            return
        for fish, agreement in agreements:
            fish.collect(agreement)
        for index in range(len(agreements[0][1].tasks)):
            lockstep([agreement.flow(index) for _, agreement in agreements], once=True)
        for fish, agreement in agreements:
            fish.deliver(agreement)

    def _race(self, batches: Sequence[Batch], steps: int) -> list[float]:
        """Workers end their steps in a random order that the synchrony allows."""
        n = len(self.fishes)
        clocks = Clocks(range(n), self.strategy.synchrony.staleness)
        server = self._server(n)
        left = dict.fromkeys(range(n), steps)
        chance = random.Random(0)
        losses = []
        while ready := [i for i in left if clocks.may_go(i)]:
            i = chance.choice(ready)
            batch = batches[(steps - left[i]) % len(batches)]
            x, y = (t.tensor_split(n)[i] for t in batch)
            fish = self.fishes[i]
            losses.append(fish.backward((x, y), scale=1.0) / len(x))
            drive(fish.mode.closing(fish.optimizer.step), lambda ask: self._answer(ask, server))
            clocks.tick(i)
            left[i] -= 1
            if not left[i]:
                del left[i]
                clocks.leave(i)
        return losses

    def _server(self, workers: int) -> ServerModel:
        add = self.strategy.compression.add
        model, optimizer = copy.deepcopy((self.fishes[0].model, self.fishes[0].optimizer))
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
        for p, part in zip(self.fishes[peer].model.parameters(), parts, strict=True):
            p.copy_((p + part) / 2)
            means.append(p.detach().clone())
        return means

    def parameters(self, worker: int = 0) -> dict[str, Tensor]:
        """One worker's parameters."""
        named = self.fishes[worker].model.named_parameters()
        return {name: p.detach().clone() for name, p in named}


def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small classifier in double precision, the same every time."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)
    )
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def digits(samples: int, batches: int = 1) -> list[Batch]:
    """Separable points of four classes, the same every time."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    made = []
    for _ in range(batches):
        y = torch.arange(samples) % 4
        noise = torch.randn(samples, 12, generator=generator, dtype=torch.float64)
        made.append((centres[y] + 0.3 * noise, y))
    return made
