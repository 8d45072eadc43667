"""What a checkpoint of a run contains.

Shared by all workers: the agreed model and, where all hold the same, the optimizer. Each worker's
own: the state of its mode, its random state, its buffers and, where replicas differ, its replica.
Gradients that no update has used yet are not saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal import checkpoint
from shoal.runtime.context import RunContext
from shoal.runtime.resume.state import (
    copied,
    local_buffers,
    model_state,
    optimizer_state,
    parameters_of,
    rank_in_replica,
    state_form,
)
from shoal.runtime.step.batches import RunPosition
from shoal.runtime.step.replica import Replica


def snapshot(
    context: RunContext, replicas: Mapping[str, Replica], position: RunPosition
) -> checkpoint.State:
    """Return the state of a run; all ranks must call it together."""
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {"rng": checkpoint.rng_state(), "place": rank_in_replica(context)}
    for name, replica in replicas.items():
        state = own[name] = {}
        with replica.agreed():
            model = model_state(replica.source)
            # Afterwards the replica is itself again, and so would be what is not copied.
            stays = replica.mode.agrees and not any(True for _ in replica.model.buffers())
            shared[name] = model if stays else copied(model)
            _save_optimizer(replica, name, shared, state)
        state["axes"] = replica.mode.state_dict()
        state["buffers"] = local_buffers(replica.source)
        if not replica.mode.agrees:
            parameters = replica.source.trainable().items()
            state["parameters"] = {n: t.detach() for n, t in parameters}
    stateful = context.settings.stateful
    own["stateful"] = {name: each.state_dict() for name, each in stateful.items()}
    return checkpoint.State(shared, own, _facts(context, replicas, position))


def _save_optimizer(
    replica: Replica, name: str, shared: dict[str, Any], own: dict[str, Any]
) -> None:
    """Save an optimizer state that serves all workers as shared, any other as the worker's own.

    The state of a sharded parameter is gathered first: then it fits any other partition.
    """
    parameters = parameters_of(replica.source)
    if replica.mode.shares_optimizer and replica.source.pipeline is None:
        state = optimizer_state(replica.optimizer, parameters)
        shared[f"{name} optimizer"] = replica.mode.optimizer_state(state)
    else:
        own["optimizer"] = optimizer_state(replica.optimizer, parameters, whole=True)


def _facts(
    context: RunContext, replicas: Mapping[str, Replica], position: RunPosition
) -> dict[str, Any]:
    return {
        "strategy": repr(context.strategy),
        "memory": state_form(context),
        "agrees": all(replica.mode.agrees for replica in replicas.values()),
        "steps": position.steps,
        "workers": context.world.size,
        "feeds": [loader.state_dict() for loader in position.loaders],
        "torch": torch.__version__,
    }
