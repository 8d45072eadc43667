"""Connect a worker to its servers, starting these where no launcher did.

The optimizer's state at the servers: fetched for a checkpoint, and given back.

With ssp and asp the servers' optimizer is the only one that steps. Each server remembers the
parameters that live with it; here their memories become one state, the same as a worker's own would
be, so that a run may go on without servers, or on another number of them.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.tree import flatten, unflatten
from shoal.errors import ExchangeTimeout, FaultError, PeerLost, UsageError
from shoal.flow import Push
from shoal.runtime.context import RunContext
from shoal.runtime.launcher.processes import die_with_parent
from shoal.runtime.remote.reduce_service import describe
from shoal.runtime.resume.state import State, load_optimizer, optimizer_state, parameters_of
from shoal.runtime.step.model import ReplicatedModel, ShardedModel
from shoal.runtime.world import env as contract
from shoal.runtime.world.world import World
from shoal.wire.channel import Hello, connect
from shoal.wire.server import ServerWire, rates

JOIN_SECONDS = 120.0


def start_servers(world: World, servers: int) -> None:
    """Start the servers that a launcher would have, dealt to the ranks, as their children."""
    if world.servers not in (0, servers):
        raise UsageError(
            f"the launcher started {world.servers} servers, but the script's strategy has "
            f"{servers}: give --strategy and the script the same, or leave one of them out"
        )
    if world.servers or world.size == 1:
        return
    for index in range(world.rank, servers, world.size):
        child = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=server_environment(world, index, servers),
            preexec_fn=die_with_parent(),
        )
        atexit.register(_stop, child)


def server_environment(world: World, index: int, servers: int) -> dict[str, str]:
    """What a server that a rank starts is told, over what the rank was."""
    env = {name: value for name, value in os.environ.items() if name not in contract.RANKS}
    return env | {
        contract.ROLE: "server",
        contract.SERVER: str(index),
        contract.SERVERS: str(servers),
        contract.TOKEN: world.token,
        "WORLD_SIZE": str(world.size),
    }


def _stop(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()


def served(
    source: ReplicatedModel | ShardedModel, optimizer: torch.optim.Optimizer, context: RunContext
) -> ServerWire:
    """The wire of a strategy with servers."""
    world, strategy = context.world, context.strategy
    _refuse_twice(world)
    hello = Hello(world.token, world.generation, world.rank)
    channels = []
    for index in range(strategy.coordination.servers):
        host, port = find(world, f"server/{index}")
        peer = f"server {index}"
        channels.append(connect(host, port, hello=hello, peer=peer, seconds=world.seconds))
    named = source.trainable()
    wire = ServerWire(
        channels,
        workers=world.size,
        describe=describe,
        sizes={name: t.numel() * t.element_size() for name, t in named.items()},
        groups=lambda: rates(optimizer),
    )
    if world.rank == 0 and not strategy.synchrony.waits:
        wire.begin({name: t.detach() for name, t in named.items()})
    # who ends without closing its run has left, and is not lost
    Finalize(None, _take_leave, args=(wire,), exitpriority=20)
    return wire


def _take_leave(wire: ServerWire) -> None:
    with suppress(FaultError):
        wire.leave()


def _refuse_twice(world: World) -> None:
    """Servers run the script up to its first distribute with them, and serve that run."""
    if world.store is not None and world.store.add(f"served/{world.rank}", 1) > 1:
        raise UsageError(
            "a second run with parameter_server in one process: its servers serve one run only; "
            "start the script anew, or use all_reduce for one of them"
        )


def find(world: World, key: str) -> tuple[str, int]:
    """Where somebody listens, once it has told."""
    if world.store is None:
        raise PeerLost("there is no store to meet at")
    end = time.monotonic() + JOIN_SECONDS
    while not world.store.check([key]):
        if time.monotonic() > end:
            raise ExchangeTimeout(f"{key} did not come within {JOIN_SECONDS:g} s")
        if world.watcher is not None and (failure := world.watcher.fetch_failure()) is not None:
            raise failure.as_error()
        time.sleep(0.02)
    host, _, port = world.store.get(key).decode().rpartition(":")
    return host, int(port)


LOOK_SECONDS = 0.02


def fetch(wire: ServerWire, own: State) -> State:
    """The servers' state under my hyper-parameters, which are those that a scheduler changes."""
    merged: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for told in wire.call("state", [({}, [])] * wire.servers):
        given = dict(zip(told.facts["names"], told.tensors, strict=True))
        state = unflatten(told.facts["tree"], given.__getitem__)
        merged |= state["state"]
        extra |= state["extra"]
    return {**own, "state": {name: merged[name] for name in sorted(merged)}, "extra": extra}


def give(wire: ServerWire, model: Mapping[str, Tensor], state: State) -> None:
    """Put model and optimizer at the servers; one worker does, while nobody pushes."""
    wire.begin(model)
    bodies = []
    for server in range(wire.servers):
        here = {n: kept for n, kept in state["state"].items() if wire.homes.get(n) == server}
        tree, tensors = flatten({**state, "state": here}, "optimizer")
        bodies.append(({"tree": tree, "names": list(tensors)}, list(tensors.values())))
    wire.call("load", bodies)


@torch.no_grad()
def pull(wire: ServerWire, source: ReplicatedModel | ShardedModel) -> dict[str, Tensor]:
    """Take the servers' model; what it was written to."""
    mine = source.trainable()
    for name, value in wire.pull().items():
        mine[name].copy_(value)
    return mine


def take_over(
    wire: ServerWire, source: ReplicatedModel | ShardedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Hold what the servers hold, the same on every worker, for nobody can ask them later."""
    pull(wire, source)
    named = parameters_of(source)
    load_optimizer(optimizer, named, fetch(wire, optimizer_state(optimizer, named)))


def await_all(wire: ServerWire, context: RunContext) -> None:
    """Wait until every worker has pushed its last.

    Who took fewer steps than others goes on ticking meanwhile, or ssp would hold these back.
    """
    world = context.world
    if world.store is None:
        raise PeerLost("there is no store to meet at")
    world.store.set(f"served-done/{world.rank}", "1")
    end, left = time.monotonic() + world.seconds, list(range(world.size))
    while left := [rank for rank in left if not world.store.check([f"served-done/{rank}"])]:
        world.raise_if_failed()
        if time.monotonic() > end:
            raise ExchangeTimeout(
                f"the end of the run: rank {', '.join(map(str, left))} still trained "
                f"{world.seconds:g} s after rank {world.rank} was done; does every rank close its "
                "run? a larger --timeout waits longer"
            )
        if not context.strategy.synchrony.free:
            wire.ask(Push({})).wait()
        time.sleep(LOOK_SECONDS)
