"""Connect a worker to its servers, starting these where no launcher did."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.util import Finalize

import torch

from shoal.errors import ExchangeTimeout, FaultError, PeerLost, UsageError
from shoal.runtime.join import World
from shoal.runtime.launcher import contract
from shoal.runtime.launcher.workers import die_with_parent
from shoal.runtime.source import Cut, Whole
from shoal.runtime.summation import describe
from shoal.runtime.team import Team
from shoal.wire.channel import Hello, connect
from shoal.wire.served import ServedWire, rates

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


def served(source: Whole | Cut, optimizer: torch.optim.Optimizer, team: Team) -> ServedWire:
    """The wire of a strategy with servers."""
    world, strategy = team.world, team.strategy
    _refuse_twice(world)
    hello = Hello(world.token, world.generation, world.rank)
    channels = []
    for index in range(strategy.coordination.servers):
        host, port = find(world, f"server/{index}")
        peer = f"server {index}"
        channels.append(connect(host, port, hello=hello, peer=peer, seconds=world.seconds))
    named = source.trainable()
    wire = ServedWire(
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


def _take_leave(wire: ServedWire) -> None:
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
        if world.alarm is not None and (failure := world.alarm.heard()) is not None:
            raise failure.as_error()
        time.sleep(0.02)
    host, _, port = world.store.get(key).decode().rpartition(":")
    return host, int(port)
