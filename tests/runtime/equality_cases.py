"""Models, data and loops of the equality law, told once for workers and for one plain process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import shoal

SAMPLES, BATCH, EPOCHS = 29, 13, 2  # batches of 13, 13 and 3: one is smaller than four workers
Build = Callable[[], tuple[nn.Module, Optimizer]]
Parameters = dict[str, Tensor]


def points(seed: int = 1) -> tuple[Tensor, Tensor]:
    """(29, 6) numbers and (29,) classes."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 6, generator=chance, dtype=torch.float64)
    return x, torch.arange(SAMPLES) % 3


class Odd(nn.Module):
    """Tied, frozen, unused, scalar, empty and strided parameters in one classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 4)
        self.tied = nn.Linear(6, 4)
        self.tied.weight = self.lift.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.strided = nn.Parameter(torch.randn(3, 4).T)
        self.conv = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) -> (n, 3)."""
        h = torch.tanh(self.frozen(self.lift(x) + self.tied(x)))  # (n, 4)
        extra = self.conv(h.view(-1, 2, 2, 1)).mean((2, 3))  # (n, 3)
        return self.scale * (h @ self.strided) + extra + self.empty.sum()


class Gated(nn.Module):
    """A part that only some samples pass, so that some workers have no gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) -> (n, 3)."""
        out = self.always(x)
        opened = x[:, 0] > 1.2
        if bool(opened.any()):
            out = out.index_add(0, opened.nonzero().flatten(), self.sometimes(x[opened]))
        return out


class Deep(nn.Module):
    """Two blocks, the first of which may be recomputed in backward."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) -> (n, 3)."""
        h = checkpoint(self.first, x, use_reentrant=False) if self.recompute else self.first(x)
        out: Tensor = self.last(h)
        return out


def build(model: Callable[[], nn.Module], optimizer: Callable[[Any], Optimizer]) -> Build:
    """The same model every time, in double precision."""

    def built() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        made = model().double()
        return made, optimizer(made.parameters())

    return built


def grouped() -> tuple[nn.Module, Optimizer]:
    """Two groups with their own rates."""
    torch.manual_seed(0)
    model = Deep().double()
    groups = [
        {"params": model.first.parameters(), "lr": 0.1, "momentum": 0.9},
        {"params": model.last.parameters(), "lr": 0.01, "weight_decay": 0.1},
    ]
    return model, SGD(groups, lr=1.0)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=0.02)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.02, weight_decay=0.1)


class Case(NamedTuple):
    """One training, alike on one process and on many workers."""

    build: Build
    options: Mapping[str, Any] = MappingProxyType({})
    schedule: bool = False
    before: Callable[[int, nn.Module, Optimizer], None] | None = None  # ahead of step k


def unfreeze(k: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Parameters join after two steps, and one leaves after four."""
    if k == 2:
        model.frozen.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.frozen.parameters()), "lr": 0.05})
    if k == 4:
        model.tied.bias.requires_grad_(False)


def partly(model: nn.Module) -> Optimizer:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def joining() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Odd().double()
    return model, partly(model)


CASES = {
    "odd, momentum": Case(build(Odd, momentum)),
    "odd, adamw": Case(build(Odd, adamw)),
    "gated, momentum": Case(build(Gated, momentum)),
    "gated, adam": Case(build(Gated, adam), {"accumulate": 2}),
    "accumulate": Case(build(Deep, momentum), {"accumulate": 3}),
    "clip": Case(build(Deep, adam), {"clip": 0.05, "accumulate": 2}),
    "recompute": Case(build(lambda: Deep(recompute=True), momentum)),
    "groups and rates": Case(grouped, schedule=True),
    "joining": Case(joining, before=unfreeze),
}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    x, y = points()
    for _ in range(EPOCHS):
        yield from zip(x.split(BATCH), y.split(BATCH), strict=True)


def alone(case: Case) -> tuple[Parameters, list[float]]:
    """One process, the whole batch, no Shoal."""
    model, optimizer = case.build()
    rates = StepLR(optimizer, 1, gamma=0.7) if case.schedule else None
    losses = []
    for k, (x, y) in enumerate(batches()):
        if case.before is not None:
            case.before(k, model, optimizer)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if clip := case.options.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        if rates is not None:
            rates.step()
    return parameters(model), losses


def trained(case: Case, strategy: str) -> tuple[Parameters, list[float]]:
    """The same, by one of several workers."""
    model, optimizer = case.build()
    rates = StepLR(optimizer, 1, gamma=0.7) if case.schedule else None
    run = shoal.distribute(
        model, optimizer, loss=nn.functional.cross_entropy, strategy=strategy, **case.options
    )
    losses = []
    with run:
        feed = run.loader(TensorDataset(*points()), BATCH, epochs=EPOCHS, shuffle=False)
        for k, batch in enumerate(feed):
            if case.before is not None:
                case.before(k, model, optimizer)
            losses.append(run.step(batch).loss)
            if rates is not None:
                rates.step()
    return parameters(model), losses


def parameters(model: nn.Module) -> Parameters:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def difference(one: Parameters, other: Parameters) -> float:
    """The largest one of any parameter."""
    assert one.keys() == other.keys()
    gaps = [(one[n] - other[n]).abs().max() for n in one if one[n].numel()]
    return max(float(gap) for gap in gaps)
