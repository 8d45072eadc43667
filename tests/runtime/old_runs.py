"""The trainings that wrote the checkpoints of tests/fixtures, and that take them up again.

Only public names of shoal are used here, because the fixtures must outlive its inner modules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
SAMPLES, FEATURES, CLASSES = 28, 4, 2
BATCH, EPOCHS = 6, 3  # an epoch has 5 batches, and the last has 4 samples


class Family(NamedTuple):
    """One training: it saves after ``step`` updates and ends after ``end`` updates.

    Attributes:
        turns: the workers step one after the other, so that an asynchronous run is repeatable.
        normalises: the model has a batch normalisation, so it has buffers.
        two: the run trains a generator and a discriminator, with two updates a batch.
    """

    strategy: str
    optimizer: str = "adam"
    workers: int = 2
    servers: int = 0
    turns: bool = False
    normalises: bool = False
    dtype: str = "float64"
    two: bool = False
    step: int = 3
    end: int = 5
    accumulate: int = 1


FAMILIES = {
    "all_reduce": Family("all_reduce, bsp, wfbp, exact, native"),
    "all_reduce_float32": Family("auto", "momentum", normalises=True, dtype="float32"),
    "all_reduce_second_epoch": Family("auto", step=7, end=9, accumulate=2),
    "error_feedback_topk": Family("fifo, error_feedback(topk(0.2))", "momentum"),
    "error_feedback_powersgd": Family("wfbp(1), error_feedback(powersgd(1))"),
    "error_feedback_random_k": Family("error_feedback(random_k(0.25, seed=1))", "momentum"),
    "momentum_correction": Family("momentum_correction(error_feedback(topk(0.25)))", "sgd"),
    "dgc": Family("dgc(0.1, 0.5, clip=1.0, warmup=2)", "sgd"),
    "after_by_size": Family("after(2, by_size(128, onebit, error_feedback(topk(0.25))))"),
    "threshold": Family("threshold(0.05, 0.5)", "momentum"),
    "priority": Family("priority(64)"),
    "priority_error_feedback": Family("priority(64), error_feedback(topk(0.2))", "momentum"),
    "adaptive": Family("adaptive", "momentum"),
    "local": Family("local(4)", normalises=True),  # step 3 is inside a period
    "local_error_feedback": Family("local(2), error_feedback(topk(0.2))"),
    "bmuf": Family("bmuf, local(2)", "sgd"),
    "gossip": Family("gossip(ring)"),
    "gossip_difference": Family("gossip(ring), difference(topk(0.25))", "momentum"),
    "gossip_asp": Family("gossip(ring), asp, fifo", workers=3, turns=True),
    "server_bsp": Family("parameter_server, bsp, fifo", "momentum", servers=1),
    "server_ssp": Family("parameter_server, ssp(2), fifo", "momentum", servers=1, turns=True),
    "server_asp": Family("parameter_server(2), asp, fifo", servers=2, turns=True),
    "shard": Family("shard=2", "momentum", workers=4),
    "tensor": Family("tensor=2", "momentum"),
    "pipe": Family("pipe=2"),
    "two_models": Family("auto", two=True, step=4, end=8),
}


class Classifier(nn.Sequential):
    """A classifier with dropout that tells how tensor ranks may cut it."""

    def tensor_plan(self, n: int) -> dict[str, str]:
        """Cut the last two layers: columns, then rows."""
        *_, middle, _, last = [str(i) for i in range(len(self))]
        return {middle: "column", last: "row"}


class Parts(NamedTuple):
    """What a script makes before it calls shoal.distribute."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    scheduler: torch.optim.lr_scheduler.StepLR


def data() -> TensorDataset:
    """Points of two classes; the first feature is the number of the sample over 32."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(SAMPLES) % CLASSES
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    x[:, 1] += 2.0 * y
    x[:, 0] = torch.arange(SAMPLES) / 32
    return TensorDataset(x, y)


def numbers(x: Tensor) -> list[int]:
    """The numbers of the samples of a batch."""
    return [int(n) for n in x[:, 0] * 32]


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer by its short name."""
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


def build(family: Family) -> Parts:
    """The same models every time."""
    torch.manual_seed(7)
    models: dict[str, nn.Module]
    if family.two:
        models = {"g": nn.Linear(3, FEATURES), "d": nn.Linear(FEATURES, 1)}
        kinds = {"g": "adam", "d": "momentum"}
    else:
        extra = [nn.BatchNorm1d(4)] if family.normalises else []
        layers = [nn.Linear(FEATURES, 4), *extra, nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4)]
        models = {"model": Classifier(*layers, nn.Tanh(), nn.Linear(4, CLASSES))}
        kinds = {"model": family.optimizer}
    for model in models.values():
        model.to(getattr(torch, family.dtype))
    optimizers = {name: optimizer_of(kinds[name], model) for name, model in models.items()}
    scheduler = torch.optim.lr_scheduler.StepLR(next(iter(optimizers.values())), 2, gamma=0.8)
    return Parts(models, optimizers, scheduler)


def distributed(family: Family, parts: Parts, strategy: str | None, **options: Any) -> shoal.Run:
    """Start a run of the family's models."""
    options = {"stateful": {"scheduler": parts.scheduler}, **options}
    if family.two:
        pairs = {name: (parts.models[name], parts.optimizers[name]) for name in parts.models}
        return shoal.distribute(pairs, strategy=strategy, **options)
    return shoal.distribute(
        parts.models["model"],
        parts.optimizers["model"],
        loss=nn.functional.cross_entropy,
        strategy=strategy,
        accumulate=family.accumulate,
        **options,
    )


def advance(run: shoal.Run, family: Family, parts: Parts, end: int) -> dict[str, list[int]]:
    """Train until ``end`` updates; the numbers of my samples, by step."""
    dtype, seen = getattr(torch, family.dtype), {}
    for x, y in run.loader(data(), BATCH, epochs=EPOCHS, seed=3):
        seen[str(run.steps)] = numbers(x)
        before, after = (run.rank, run.size - run.rank) if family.turns else (0, 0)
        for _ in range(before):
            run.agree(0)
        if family.two:
            duel(run, parts.models, x.to(dtype))
        else:
            run.step((x.to(dtype), y))
        for _ in range(after):
            run.agree(0)
        parts.scheduler.step()
        if run.steps >= end:
            break
    return seen


def duel(run: shoal.Run, models: dict[str, nn.Module], x: Tensor) -> None:
    """Update a discriminator, then a generator."""
    g, d = models["g"], models["d"]
    noise = torch.randn(len(x), 3, dtype=x.dtype)
    run.backward(d(g(noise).detach()).mean() - d(x).mean(), len(x))
    run.update("d")
    run.backward(-d(g(noise)).mean(), len(x))
    run.update("g")
    d.zero_grad()  # the generator's loss left gradients there


def values(models: dict[str, nn.Module]) -> dict[str, Any]:
    """All numbers of the models as plain lists; of a model that is cut, what this rank can see."""
    found = {}
    for kind, model in models.items():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[f"{kind}.{name}"] = whole.detach().tolist()
    return found


def agreed_loss(run: shoal.Run, family: Family) -> float | None:
    """The loss of the agreed model over all data, which all workers compute together."""
    if family.two:
        return None  # run.evaluate is for one model
    x, y = data().tensors
    return run.evaluate(TensorDataset(x.to(getattr(torch, family.dtype)), y))["loss"]


def write(family: Family, directory: str) -> dict[str, Any]:
    """Train a few steps and leave a checkpoint; what this worker held then."""
    parts = build(family)
    run = distributed(family, parts, family.strategy, checkpoint=directory, every=family.step)
    with run:
        advance(run, family, parts, family.step)
        run.drain()
        return standing(run, family, parts)


def whole(family: Family, directory: str) -> dict[str, Any]:
    """Train to the end in one loop; what this worker held at the end, and its samples."""
    parts = build(family)
    run = distributed(family, parts, family.strategy, checkpoint=directory, every=family.step)
    with run:
        seen = advance(run, family, parts, family.end)
        run.drain()
        return ending(run, family, parts, seen)


def restored(family: Family, directory: str) -> dict[str, Any]:
    """Restore a checkpoint and train to the end; all that write and whole tell."""
    parts = build(family)
    with distributed(family, parts, family.strategy) as run:
        run.restore(directory)
        found = standing(run, family, parts)
        seen = advance(run, family, parts, family.end)
        run.drain()
        return {**found, **ending(run, family, parts, seen)}


def standing(run: shoal.Run, family: Family, parts: Parts) -> dict[str, Any]:
    """What a worker holds when the checkpoint is written or was restored."""
    return {
        "step": run.steps,
        "rate": parts.scheduler.get_last_lr(),
        "saved": values(shown(run, family, parts)),
        "agreed_loss": agreed_loss(run, family),
    }


def ending(
    run: shoal.Run, family: Family, parts: Parts, seen: dict[str, list[int]]
) -> dict[str, Any]:
    """What a worker holds at the end, and the samples that it saw after the checkpoint."""
    late = {step: ids for step, ids in seen.items() if int(step) >= family.step}
    rate = parts.scheduler.get_last_lr()
    return {"end": values(shown(run, family, parts)), "samples": late, "end_rate": rate}


def shown(run: shoal.Run, family: Family, parts: Parts) -> dict[str, nn.Module]:
    """The models whose numbers are compared; of a pipeline it is this rank's stage."""
    return parts.models if family.two else {"model": run.model}


def restored_alone(family: Family, directory: str) -> dict[str, Any]:
    """Restore a checkpoint on one worker under auto, which takes the agreed model."""
    parts = build(family)
    with distributed(family, parts, "auto") as run:
        run.restore(directory)
        return {
            "step": run.steps,
            "agreed": values(parts.models),
            "agreed_loss": agreed_loss(run, family),
            "rate": parts.scheduler.get_last_lr(),
        }


def several(work: Any, names: list[str], directory: str) -> dict[str, Any]:
    """Do the work of several families one after the other in one process."""
    return {name: work(FAMILIES[name], f"{directory}/{name}") for name in names}


def expected(name: str) -> dict[str, Any]:
    """What was recorded of a family when its checkpoint was written."""
    found: dict[str, Any] = json.loads((CHECKPOINTS / name / "expected.json").read_text())
    return found
