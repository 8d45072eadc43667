"""``shoal.distribute``: from a model and an optimizer to a run."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from shoal.errors import UsageError
from shoal.rules import Facts
from shoal.runtime import capture
from shoal.runtime import validate as closures
from shoal.runtime.context import RunContext
from shoal.runtime.loss import Loss, plain
from shoal.runtime.remote.client import start_servers
from shoal.runtime.remote.server import serve
from shoal.runtime.resume import save as saving
from shoal.runtime.run import Run
from shoal.runtime.settings import Settings
from shoal.runtime.step.model import ReplicatedModel, ShardedModel
from shoal.runtime.step.replica import Replica
from shoal.runtime.validate import Models, check_loss, read_models
from shoal.runtime.wires import wire
from shoal.runtime.world import env as contract
from shoal.runtime.world.join import World, agree_layout, join, leave
from shoal.strategy import AUTO, Strategy, parse
from shoal.timeline.record import NullRecorder, Recorder

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shoal.runtime.settings import RunOptions

log = logging.getLogger("shoal")


def distribute(
    model: nn.Module | Models,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: Loss | None = None,
    strategy: str | Strategy | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Join the other workers and train with them.

    Args:
        model: the model, built alike on every worker (rank 0's weights are taken), or several:
            ``{"g": (G, optimizer_g), "d": (D, optimizer_d)}``.
        optimizer: over the model's parameters.
        loss: ``(output, target) -> scalar``; None takes the model's own.
        strategy: what to do; None takes the command line's, or ``auto``.
        options: see :class:`shoal.runtime.settings.Settings`.
    """
    _be_heard()
    settings = Settings.named(options)
    models = read_models(model, optimizer)
    check_loss(loss)
    chosen = _strategy(strategy)
    if capture.wanted():
        return capture.stand_in(models, loss=loss, strategy=chosen, settings=settings)
    world = join(backend=settings.backend, seconds=settings.timeout)
    chosen.bind(_facts(world, models, settings))
    if world.role == "server":
        serve(world, chosen, models)
        leave(world)
        raise SystemExit(0)
    _agree(world, models, chosen, settings)  # before any exchange whose size depends on it
    start_servers(world, chosen.coordination.servers)
    recorder = Recorder(world.rank) if settings.timeline else NullRecorder(world.rank)
    mesh = None
    if chosen.partition.cuts:
        from shoal.runtime import parallel as partitioned

        mesh = partitioned.mesh(chosen.partition, world.size)
    context = RunContext(world, chosen, settings, recorder, mesh)
    replicas = {}
    for name, (module, used) in models.items():
        module.to(world.device)
        _same_start(module, world)
        source = ReplicatedModel(module) if mesh is None else _cut(module, used, context)
        replicas[name] = Replica(source, used, context=context, wire=wire(source, used, context))
    run = Run(replicas, loss=loss, context=context)
    _announce(run, auto=(strategy or os.environ.get(contract.STRATEGY) or AUTO) == AUTO)
    saving.resume(run)
    return run


def _strategy(given: str | Strategy | None) -> Strategy:
    """The script's own wins, and says so when the command line disagrees."""
    told = os.environ.get(contract.STRATEGY) or None
    if given is None:
        return _read(told or AUTO)
    own = parse(given) if isinstance(given, str) else given
    if not isinstance(own, Strategy):
        raise UsageError(f"strategy={given!r}: text or a Strategy")
    if told is not None and _read(told) != own:
        log.warning("the script sets its own strategy (%s), so --strategy %s is ignored", own, told)
    return own


def _read(told: str) -> Strategy:
    try:
        return parse(told)
    except UsageError as error:
        raise UsageError(f"{contract.STRATEGY}={told!r}: {error}") from error


def _facts(world: World, models: Models, settings: Settings) -> Facts:
    return Facts(
        ranks=world.size if world.role == "worker" else world.workers,
        clips=settings.clip is not None,
        skips=settings.nonfinite == "skip",
        closure=any(closures.asks(used) for _, used in models.values()),
        models=len(models),
        momentum=any(_has_momentum(used) for _, used in models.values()),
    )


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """SGD's, or Adam's first moment."""
    groups = optimizer.param_groups
    return any(group.get("momentum") or group.get("betas", (0,))[0] for group in groups)


def _agree(world: World, models: Models, strategy: Strategy, settings: Settings) -> None:
    """Everybody must have been given the same model, optimizer, strategy and settings."""
    facts = {"strategy": repr(strategy)}
    for name in ("accumulate", "clip", "nonfinite", "every"):
        facts[name] = repr(getattr(settings, name))
    facts["checkpoint"] = "none" if settings.checkpoint is None else "some"
    for name, (module, used) in models.items():
        for key, p in module.named_parameters():
            frozen = "" if p.requires_grad else " frozen"
            facts[f"{name}.{plain(key)}"] = f"{tuple(p.shape)} {p.dtype}{frozen}"
        for key, b in module.named_buffers():
            facts[f"{name}.{plain(key)}"] = f"{tuple(b.shape)} {b.dtype}"
        facts[f"{name} optimizer"] = type(used).__name__
        for index, group in enumerate(used.param_groups):
            for key, value in sorted(group.items()):
                if key != "params":
                    facts[f"{key} of {name} optimizer's group {index}"] = _told(value)
    agree_layout(world, facts)


def _told(value: object) -> str:
    """A value as all ranks would write it: where an object lies is each rank's own."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@torch.no_grad()
def _same_start(module: nn.Module, world: World) -> None:
    """All replicas start from rank 0's numbers."""
    if world.size == 1:
        return
    others = False
    for tensor in (*module.parameters(), *module.buffers()):
        dense = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(dense, 0)
        others = others or not torch.equal(dense, tensor)
        tensor.copy_(dense)
    if others:
        log.info("rank %d had other weights than rank 0: rank 0's were taken", world.rank)


def _cut(module: nn.Module, used: torch.optim.Optimizer, context: RunContext) -> ShardedModel:
    from shoal.runtime import parallel as partitioned

    if context.mesh is None:
        raise UsageError("a model is cut over a mesh")
    return ShardedModel(partitioned.parallelize(module, used, mesh=context.mesh))


def _be_heard() -> None:
    """Show what Shoal says, unless the script has set up logging itself."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("shoal: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def _announce(run: Run, *, auto: bool) -> None:
    """Say what will be done, once; never silently something else."""
    if run.is_main and run.size > 1:
        if auto:
            log.info("strategy auto: there is no planner yet, so this is the plainest one")
        log.info("%d workers on %s: %s", run.size, run.context.world.backend, run.context.strategy)
        for word in run.context.strategy.advice():
            log.warning("advice: %s", word)
