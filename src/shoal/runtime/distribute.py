"""``shoal.distribute``: make a run from a model and an optimizer."""

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
from shoal.runtime.context import RunContext
from shoal.runtime.loss import Loss, plain
from shoal.runtime.remote.client import start_servers
from shoal.runtime.remote.server import serve
from shoal.runtime.run import Run
from shoal.runtime.settings import Settings
from shoal.runtime.step.model import ModelPart, ReplicatedModel, ShardedModel
from shoal.runtime.step.replica import Replica
from shoal.runtime.validate import Models, check_loss, needs_closure, read_models
from shoal.runtime.wires import wire
from shoal.runtime.world import env
from shoal.runtime.world.join import agree_layout, join, leave
from shoal.runtime.world.world import World
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
    """Join the other workers and return a run that trains with them. A server process exits.

    Args:
        model: the model, with equal shapes on every worker (rank 0's weights are used), or several
            models with optimizers: ``{"g": (G, optimizer_g), "d": (D, optimizer_d)}``.
        optimizer: an optimizer of the model's parameters. It must be None with several models.
        loss: ``(output, target) -> scalar``, or None if the model returns its loss.
        strategy: the techniques to use. None means the command line's strategy, or ``auto``.
        options: see :class:`shoal.runtime.settings.Settings`.
    """
    _log_to_stderr()
    settings = Settings.named(options)
    models = read_models(model, optimizer)
    check_loss(loss)
    chosen = _strategy(strategy)
    if capture.is_capturing():
        return capture.capturing_run(models, loss=loss, strategy=chosen, settings=settings)
    world = join(backend=settings.backend, seconds=settings.timeout)
    chosen.bind(_facts(world, models, settings))
    if world.env.role == "server":
        serve(world, chosen, models)
        leave(world)
        raise SystemExit(0)
    _check_equal(world, models, chosen, settings)  # before tensors are exchanged
    start_servers(world, chosen.coordination.servers)
    recorder = Recorder(world.rank) if settings.timeline else NullRecorder(world.rank)
    mesh = None
    if chosen.partition.cuts:
        from shoal.runtime import parallel

        mesh = parallel.mesh(chosen.partition, world.size)
    context = RunContext(world, chosen, settings, recorder, mesh)
    replicas = {}
    for name, (module, used) in models.items():
        module.to(world.device)
        _broadcast_weights(module, world)
        model_part = _model_part(module, used, context)
        replicas[name] = Replica(model_part, used, context, wire(model_part, used, context))
    run = Run(replicas, loss=loss, context=context)
    _announce(run, auto=(strategy or os.environ.get(env.STRATEGY) or AUTO) == AUTO)
    run.checkpointer.resume()
    return run


def _strategy(argument: str | Strategy | None) -> Strategy:
    """Return the script's strategy, or the command line's, or auto. Warn if the two differ."""
    option = os.environ.get(env.STRATEGY) or None
    if argument is None:
        return _parse_option(option or AUTO)
    own = parse(argument) if isinstance(argument, str) else argument
    if not isinstance(own, Strategy):
        raise UsageError(f"strategy={argument!r}: the strategy must be text or a Strategy")
    if option is not None and _parse_option(option) != own:
        log.warning("the script sets the strategy %s, so --strategy %s is ignored", own, option)
    return own


def _parse_option(text: str) -> Strategy:
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{env.STRATEGY}={text!r}: {error}") from error


def _facts(world: World, models: Models, settings: Settings) -> Facts:
    return Facts(
        ranks=world.env.workers,
        clips=settings.clip is not None,
        skips=settings.nonfinite == "skip",
        closure=any(needs_closure(used) for _, used in models.values()),
        models=len(models),
        momentum=any(_has_momentum(used) for _, used in models.values()),
    )


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer uses momentum, as SGD can, or a first moment, as Adam."""
    groups = optimizer.param_groups
    return any(group.get("momentum") or group.get("betas", (0,))[0] for group in groups)


def _check_equal(world: World, models: Models, strategy: Strategy, settings: Settings) -> None:
    """Raise if ranks differ in models, optimizers, strategy, or settings that must be equal."""
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
                    facts[f"{key} of {name} optimizer's group {index}"] = _comparable(value)
    agree_layout(world, facts)


def _comparable(value: object) -> str:
    """Return a value as text, without memory addresses, which differ between ranks."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@torch.no_grad()
def _broadcast_weights(module: nn.Module, world: World) -> None:
    """Copy rank 0's parameters and buffers to all ranks, in place."""
    if world.size == 1:
        return
    differs = False
    for tensor in (*module.parameters(), *module.buffers()):
        dense = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(dense, 0)
        differs = differs or not torch.equal(dense, tensor)
        tensor.copy_(dense)
    if differs:
        log.info(
            "rank %d now uses the weights of rank 0, because its own were different", world.rank
        )


def _model_part(module: nn.Module, used: torch.optim.Optimizer, context: RunContext) -> ModelPart:
    """Return the model, or this rank's part of it if the strategy shards the model."""
    if context.mesh is None:
        return ReplicatedModel(module)
    from shoal.runtime import parallel

    return ShardedModel(parallel.parallelize(module, used, mesh=context.mesh))


def _log_to_stderr() -> None:
    """Print Shoal's log to stderr, unless the script has configured logging."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("shoal: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def _announce(run: Run, *, auto: bool) -> None:
    """Log the strategy and its advice on the main rank, if there are several ranks."""
    if run.is_main and run.size > 1:
        if auto:
            log.info("strategy auto: there is no planner yet, so the default strategy is used")
        log.info("%d workers on %s: %s", run.size, run.context.world.backend, run.context.strategy)
        for advice in run.context.strategy.advice():
            log.warning("advice: %s", advice)
