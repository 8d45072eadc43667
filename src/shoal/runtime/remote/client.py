"""A worker's side of parameter servers: start them, connect, copy their state, disconnect.

With bsp the servers only sum. With ssp and asp they have the model and the only optimizer that
steps; each has the state of the parameters that live there. A checkpoint merges these into one
optimizer state, the same as a worker's own would be, so that a run can go on with another number of
servers, or with none.
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
    """Start the servers as child processes of the ranks, unless a launcher started them."""
    if world.env.servers not in (0, servers):
        raise UsageError(
            f"the launcher started {world.env.servers} servers, but the script's strategy has "
            f"{servers}: give --strategy and the script the same strategy, or leave one out"
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


def served(
    source: ReplicatedModel | ShardedModel, optimizer: torch.optim.Optimizer, context: RunContext
) -> ServerWire:
    """Connect to the servers of a strategy and return the wire; rank 0 sends the initial model."""
    world, strategy = context.world, context.strategy
    # a server runs the script up to its first distribute, and serves that run only
    if world.store is not None and world.store.add(f"served/{world.rank}", 1) > 1:
        raise UsageError(
            "a second run with parameter_server in one process: its servers serve one run only; "
            "start the script anew, or use all_reduce for one of them"
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
    # a process that ends without closing its run still leaves, or the servers would call it lost
    Finalize(None, wire.leave, exitpriority=20)
    return wire


def fetch(wire: ServerWire, own: State) -> State:
    """Return the servers' optimizer state, with the hyper-parameters of ``own``.

    Schedulers change hyper-parameters on the workers, so the workers' are the current ones.
    """
    merged: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for reply in wire.call("state", [({}, [])] * wire.servers):
        tensors = dict(zip(reply.facts["names"], reply.tensors, strict=True))
        state = unflatten(reply.facts["tree"], tensors.__getitem__)
        merged |= state["state"]
        extra |= state["extra"]
    return {**own, "state": {name: merged[name] for name in sorted(merged)}, "extra": extra}


def give(wire: ServerWire, model: Mapping[str, Tensor], state: State) -> None:
    """Send model and optimizer state to the servers; one worker does, while none pushes."""
    wire.begin(model)
    bodies = []
    for server in range(wire.servers):
        part = {n: value for n, value in state["state"].items() if wire.homes.get(n) == server}
        tree, tensors = flatten({**state, "state": part}, "optimizer")
        bodies.append(({"tree": tree, "names": list(tensors)}, list(tensors.values())))
    wire.call("load", bodies)


@torch.no_grad()
def pull(wire: ServerWire, source: ReplicatedModel | ShardedModel) -> dict[str, Tensor]:
    """Copy the servers' model into this worker's parameters, and return these."""
    parameters = source.trainable()
    for name, value in wire.pull().items():
        parameters[name].copy_(value)
    return parameters


def take_over(
    wire: ServerWire, source: ReplicatedModel | ShardedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Copy model and optimizer state from the servers before they shut down."""
    pull(wire, source)
    parameters = parameters_of(source)
    load_optimizer(optimizer, parameters, fetch(wire, optimizer_state(optimizer, parameters)))


def await_all(wire: ServerWire, context: RunContext) -> None:
    """Wait until every worker has made its last push.

    A worker that took fewer steps pushes empty messages meanwhile, so that its clock advances and
    ssp does not hold the others back.
    """
    world, store = context.world, store_of(context.world)
    store.set(f"served-done/{world.rank}", "1")
    end, training = time.monotonic() + world.seconds, list(range(world.size))
    while training := [rank for rank in training if not store.check([f"served-done/{rank}"])]:
        world.raise_if_failed()
        if time.monotonic() > end:
            raise ExchangeTimeout(
                f"the end of the run: rank {', '.join(map(str, training))} still trained "
                f"{world.seconds:g} s after rank {world.rank} was done; does every rank close its "
                "run? a larger --timeout waits longer"
            )
        if not context.strategy.synchrony.free:
            wire.ask(Push({})).wait()
        time.sleep(POLL_SECONDS)
