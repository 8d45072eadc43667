"""The optimizer's state at the servers: fetched for a checkpoint, and given back.

With ssp and asp the servers' optimizer is the only one that steps. Each server remembers the
parameters that live with it; here their memories become one state, the same as a worker's own would
be, so that a run may go on without servers, or on another number of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.tree import flatten, unflatten
from shoal.errors import ExchangeTimeout, PeerLost
from shoal.flow import Push
from shoal.runtime.alarm import raise_if_failed
from shoal.runtime.source import Cut, Whole
from shoal.runtime.state import State, load_optimizer, optimizer_state, parameters_of
from shoal.runtime.team import Team
from shoal.wire.served import ServedWire

LOOK_SECONDS = 0.02


def fetch(wire: ServedWire, own: State) -> State:
    """The servers' state under my hyper-parameters, which are those that a scheduler changes."""
    merged: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for told in wire.call("state", [({}, [])] * wire.servers):
        given = dict(zip(told.facts["names"], told.tensors, strict=True))
        state = unflatten(told.facts["tree"], given.__getitem__)
        merged |= state["state"]
        extra |= state["extra"]
    return {**own, "state": {name: merged[name] for name in sorted(merged)}, "extra": extra}


def give(wire: ServedWire, model: Mapping[str, Tensor], state: State) -> None:
    """Put model and optimizer at the servers; one worker does, while nobody pushes."""
    wire.begin(model)
    bodies = []
    for server in range(wire.servers):
        here = {n: kept for n, kept in state["state"].items() if wire.homes.get(n) == server}
        tree, tensors = flatten({**state, "state": here}, "optimizer")
        bodies.append(({"tree": tree, "names": list(tensors)}, list(tensors.values())))
    wire.call("load", bodies)


@torch.no_grad()
def pull(wire: ServedWire, source: Whole | Cut) -> dict[str, Tensor]:
    """Take the servers' model; what it was written to."""
    mine = source.trainable()
    for name, value in wire.pull().items():
        mine[name].copy_(value)
    return mine


def take_over(wire: ServedWire, source: Whole | Cut, optimizer: torch.optim.Optimizer) -> None:
    """Hold what the servers hold, the same on every worker, for nobody can ask them later."""
    pull(wire, source)
    named = parameters_of(source)
    load_optimizer(optimizer, named, fetch(wire, optimizer_state(optimizer, named)))


def await_all(wire: ServedWire, team: Team) -> None:
    """Wait until every worker has pushed its last.

    Who took fewer steps than others goes on ticking meanwhile, or ssp would hold these back.
    """
    world = team.world
    if world.store is None:
        raise PeerLost("there is no store to meet at")
    world.store.set(f"served-done/{world.rank}", "1")
    end, left = time.monotonic() + world.seconds, list(range(world.size))
    while left := [rank for rank in left if not world.store.check([f"served-done/{rank}"])]:
        raise_if_failed(world)
        if time.monotonic() > end:
            raise ExchangeTimeout(
                f"the end of the run: rank {', '.join(map(str, left))} still trained "
                f"{world.seconds:g} s after rank {world.rank} was done; does every rank close its "
                "run? a larger --timeout waits longer"
            )
        if not team.strategy.synchrony.free:
            wire.ask(Push({})).wait()
        time.sleep(LOOK_SECONDS)
