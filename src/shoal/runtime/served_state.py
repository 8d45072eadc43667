"""The optimizer's state at the servers: fetched for a checkpoint, and given back.

With ssp and asp the servers' optimizer is the only one that steps. Each server remembers the
parameters that live with it; here their memories become one state, the same as a worker's own would
be, so that a run may go on without servers, or on another number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.checkpoint.tree import flatten, unflatten
from shoal.runtime.state import State
from shoal.wire.served import ServedWire


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
