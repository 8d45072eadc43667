"""The worker's side of parameter servers: start them, connect, copy their state, disconnect.

With bsp the servers only average. With ssp and asp they hold the model, and only their optimizers
take steps; each server holds the optimizer state of its share of the parameters. A checkpoint
merges these states into one, in the form of a single optimizer's state, so that a run can be
resumed with another number of servers, or with none.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.tree import flatten, unflatten
from shoal.errors import ExchangeTimeout, UsageError
from shoal.flow import Push
from shoal.runtime.context import RunContext
from shoal.runtime.launcher.processes import die_with_parent
from shoal.runtime.remote.addresses import POLL_SECONDS, connect_to, store_of
from shoal.runtime.remote.reduce_service import describe
from shoal.runtime.resume.state import State, load_optimizer, optimizer_state, parameters_of
from shoal.runtime.step.model import ReplicatedModel, ShardedModel
from shoal.runtime.world import env
from shoal.runtime.world.world import World
from shoal.wire.server import ServerWire, hyper_parameters


def start_servers(world: World, servers: int) -> None:
    """Start this rank's share of the servers. Every rank must call this function.

    Does nothing if a launcher has started the servers, or if there is only one worker.
    """
    if world.env.servers not in (0, servers):
        raise UsageError(
            f"the launcher started {world.env.servers} servers, but the script's strategy has "
            f"{servers}; use the same strategy in --strategy and in the script, or leave one out"
        )
    if world.env.servers or world.size == 1:
        return
    inherited = {name: value for name, value in os.environ.items() if name not in env.RANKS}
    shared = {env.ROLE: "server", env.SERVERS: str(servers), env.TOKEN: world.env.token}
    inherited |= shared | {"WORLD_SIZE": str(world.size)}
    for index in range(world.rank, servers, world.size):
        child = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=inherited | {env.SERVER: str(index)},
            preexec_fn=die_with_parent(),
        )
        atexit.register(_stop, child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()


def connect_to_servers(
    source: ReplicatedModel | ShardedModel, optimizer: torch.optim.Optimizer, context: RunContext
) -> ServerWire:
    """Return a wire to all servers. With ssp and asp, rank 0 also sends the initial model."""
    world, strategy = context.world, context.strategy
    # a server runs the script up to its first distribute, and serves only that run
    if world.store is not None and world.store.add(f"served/{world.rank}", 1) > 1:
        raise UsageError(
            "this process has already had a run with parameter_server, and its servers serve only "
            "one; put the second run into another script, or use all_reduce for it"
        )
    servers = range(strategy.coordination.servers)
    parameters = source.trainable()
    wire = ServerWire(
        [connect_to(world, f"server/{index}", f"server {index}") for index in servers],
        workers=world.size,
        describe=describe,
        sizes={name: t.numel() * t.element_size() for name, t in parameters.items()},
        groups=lambda: hyper_parameters(optimizer),
    )
    if world.rank == 0 and not strategy.synchrony.waits:
        wire.begin({name: t.detach() for name, t in parameters.items()})
    # Leave even if the script does not close its run, or the servers would report a failure.
    Finalize(None, wire.leave, exitpriority=20)
    return wire


def fetch_state(wire: ServerWire, own: State) -> State:
    """Return the servers' optimizer state, with the hyper-parameters of ``own``.

    Learning-rate schedulers run on the workers, so the workers have the current hyper-parameters.
    """
    merged: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for reply in wire.call("state", [({}, [])] * wire.servers):
        tensors = dict(zip(reply.facts["names"], reply.tensors, strict=True))
        state = unflatten(reply.facts["tree"], tensors.__getitem__)
        merged |= state["state"]
        extra |= state["extra"]
    return {**own, "state": {name: merged[name] for name in sorted(merged)}, "extra": extra}


def send_state(wire: ServerWire, model: Mapping[str, Tensor], state: State) -> None:
    """Replace the servers' model and state. One worker may call this, while none pushes."""
    wire.begin(model)
    bodies = []
    for server in range(wire.servers):
        part = {n: value for n, value in state["state"].items() if wire.homes.get(n) == server}
        tree, tensors = flatten({**state, "state": part}, "optimizer")
        bodies.append(({"tree": tree, "names": list(tensors)}, list(tensors.values())))
    wire.call("load", bodies)


@torch.no_grad()
def pull(wire: ServerWire, source: ReplicatedModel | ShardedModel) -> dict[str, Tensor]:
    """Copy the servers' model into this worker's parameters, in place, and return these."""
    parameters = source.trainable()
    for name, value in wire.pull().items():
        parameters[name].copy_(value)
    return parameters


def take_over(
    wire: ServerWire, source: ReplicatedModel | ShardedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Copy the servers' model and optimizer state into this worker's, before the servers end."""
    pull(wire, source)
    parameters = parameters_of(source)
    load_optimizer(optimizer, parameters, fetch_state(wire, optimizer_state(optimizer, parameters)))


def wait_for_pushes(wire: ServerWire, context: RunContext) -> None:
    """Wait until every worker has made its last push.

    With ssp this worker pushes empty messages meanwhile, so that its step count rises and the
    servers do not make the other workers wait for this one.
    """
    world, store = context.world, store_of(context.world)
    store.set(f"served-done/{world.rank}", "1")
    end, training = time.monotonic() + world.seconds, list(range(world.size))
    while training := [rank for rank in training if not store.check([f"served-done/{rank}"])]:
        world.raise_if_failed()
        if time.monotonic() > end:
            raise ExchangeTimeout(
                f"rank {', '.join(map(str, training))} did not end its run within "
                f"{world.seconds:g} s after rank {world.rank}; close the run on every rank, "
                "or use a larger --timeout"
            )
        if not context.strategy.synchrony.free:
            wire.ask(Push({})).wait()
        time.sleep(POLL_SECONDS)
