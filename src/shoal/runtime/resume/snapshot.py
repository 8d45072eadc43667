"""Return the state of a run for a checkpoint, and load it on the same or other workers.

A checkpoint contains:

* The agreed model is saved once, and so is an optimizer state that all ranks share (no pipeline).
* Each rank saves the state of its mode, its random state, its buffers, and the ``stateful`` objects
  of the script. It saves its parameters if replicas may differ, and an optimizer state that is not
  saved once.

Gradients that no update has used yet are not saved.

On load, the model, the optimizer and the loaders are checked before anything is overwritten. With
the same number of ranks and the same partition, each rank gets its own state back. Otherwise all
workers start from the agreed model, the order of samples continues, and optimizer states of several
ranks are averaged. On another number of ranks, residuals are averaged, too, and random generators
stay as the script seeded them. Averaging the residuals does not change their mean over workers, and
only this mean reaches the model. A mode's state that does not fit the strategy is dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import checkpoint
from shoal.checkpoint.tree import flatten
from shoal.errors import CheckpointMismatch
from shoal.runtime.context import RunContext
from shoal.runtime.resume.state import (
    State,
    check_optimizer,
    copied,
    load_model,
    load_optimizer,
    local_buffers,
    model_layout,
    model_state,
    optimizer_state,
    parameters_of,
    replica_coordinates,
    state_compatibility_key,
)
from shoal.runtime.step.batches import RunLoader, RunPosition
from shoal.runtime.step.replica import Replica

log = logging.getLogger("shoal")
FACTS = {"strategy", "memory", "agrees", "steps", "feeds"}


def snapshot(
    context: RunContext, replicas: Mapping[str, Replica], position: RunPosition
) -> checkpoint.State:
    """Return the state of a run. All ranks must call this together."""
    shared: State = {}
    own: State = {"rng": checkpoint.rng_state(), "place": replica_coordinates(context)}
    for name, replica in replicas.items():
        state = own[name] = {}
        with replica.agreed():
            model = model_state(replica.model_part)
            # After this block the replica has its own values again, so copy tensors that change.
            unchanged = replica.mode.agrees and not any(True for _ in replica.model.buffers())
            shared[name] = model if unchanged else copied(model)
            _save_optimizer(replica, name, shared, state)
        state["axes"] = replica.mode.state_dict()
        state["buffers"] = local_buffers(replica.model_part)
        if not replica.mode.agrees:
            parameters = replica.model_part.trainable().items()
            state["parameters"] = {n: t.detach() for n, t in parameters}
    stateful = context.settings.stateful
    own["stateful"] = {name: each.state_dict() for name, each in stateful.items()}
    facts = {
        "strategy": repr(context.strategy),
        "memory": state_compatibility_key(context),
        "agrees": all(replica.mode.agrees for replica in replicas.values()),
        "steps": position.steps,
        "workers": context.world.size,
        "feeds": [loader.state_dict() for loader in position.loaders],
        "torch": torch.__version__,
    }
    return checkpoint.State(shared, own, facts)


def _save_optimizer(replica: Replica, name: str, shared: State, own: State) -> None:
    """Add the optimizer state to ``shared`` if all ranks share it, otherwise to ``own``.

    In ``own``, the state of a sharded parameter is gathered, so that any partition can load it.
    """
    parameters = parameters_of(replica.model_part)
    if replica.mode.shares_optimizer and replica.model_part.pipeline is None:
        state = optimizer_state(replica.optimizer, parameters)
        shared[f"{name} optimizer"] = replica.mode.optimizer_state(state)
    else:
        own["optimizer"] = optimizer_state(replica.optimizer, parameters, whole=True)


class Restorer:
    """Restores one checkpoint into the run that continues it."""

    def __init__(self, context: RunContext, loaded: checkpoint.Loaded) -> None:
        self.context, self.loaded = context, loaded
        self.own: Mapping[str, Any] | None = loaded.mine  # None on another number of ranks
        self.dropped: list[str] = []  # names of models whose saved mode state is not used
        self._parts: list[Mapping[str, Any]] = []
        self._optimizers: dict[str, State] = {}

    def check(self, replicas: Mapping[str, Replica], loaders: Sequence[RunLoader]) -> None:
        """Raise if the checkpoint does not fit models, optimizers or loaders. Change nothing."""
        if lacking := FACTS - set(self.loaded.meta):
            raise CheckpointMismatch(
                f"{self.loaded.path} was not saved by a run, because it has no {min(lacking)!r}: "
                "choose a checkpoint that run.save wrote"
            )
        for name, replica in replicas.items():
            checkpoint.match(model_layout(replica.model_part), self.loaded, under=name)
            state = self._optimizers[name] = self._optimizer(name, replica)
            check_optimizer(replica.optimizer, parameters_of(replica.model_part), state)
        for loader, position in zip(loaders, self.loaded.meta["feeds"], strict=False):
            loader.check(position)

    def _optimizer(self, name: str, replica: Replica) -> State:
        """Return the shared saved optimizer state, or this rank's own, or all ranks' merged."""
        shared: State | None = self.loaded.shared.get(f"{name} optimizer")
        if shared is not None:
            return shared
        own = self._own_part
        if own is not None and (self.loaded.meta["agrees"] or not replica.mode.agrees):
            state: State = own[name]["optimizer"]
            return state
        return _merge_optimizers([part[name]["optimizer"] for part in self._all_parts()])

    @property
    def _own_part(self) -> Mapping[str, Any] | None:
        """This rank's saved state, or None if the number of ranks or the partition changed."""
        same_partition = self.loaded.meta["memory"][-1] == state_compatibility_key(self.context)[-1]
        return self.own if same_partition else None

    def _all_parts(self) -> list[Mapping[str, Any]]:
        """Return the own state of each rank that saved. The files are read only once."""
        if not self._parts:
            self._parts = [self.loaded.parts(rank) for rank in range(self.loaded.size)]
        return self._parts

    @torch.no_grad()
    def restore(self, name: str, replica: Replica) -> None:
        """Load the model, the optimizer state and the mode's state of one replica, in place."""
        load_model(replica.model_part, self.loaded.shared[name])
        optimizer = replica.mode.load_remote(self._optimizers[name])
        load_optimizer(replica.optimizer, parameters_of(replica.model_part), optimizer)
        state = self._mode_state(name, replica)
        if self._own_part is not None:
            own = self._own_part[name]
            _copy_matching(local_buffers(replica.model_part), own["buffers"])
            if state and not replica.mode.agrees:
                _copy_matching(replica.model_part.trainable(), own.get("parameters", {}))
        replica.mode.load_state_dict(_to_device(state, self.context.world.device))

    def _mode_state(self, name: str, replica: Replica) -> Mapping[str, Any]:
        """Return the saved state of the mode, or {} if the current strategy cannot use it."""
        first = self.own if self.own is not None else self._all_parts()[0]
        saved: Mapping[str, Any] = first[name]["axes"]
        fits = set(saved) == set(replica.mode.state_dict())
        if not fits or self.loaded.meta["memory"] != state_compatibility_key(self.context):
            self.dropped += [name] if flatten(saved, name)[1] else []
            return {}
        if self.own is not None:
            return saved
        place = replica_coordinates(self.context)
        alike = [part[name]["axes"] for part in self._all_parts() if part["place"] == place]
        merged: Mapping[str, Any] = merge_states(alike)
        return merged

    def restore_stateful(self) -> None:
        """Load the ``stateful`` objects, from rank 0 if the number of ranks has changed."""
        saved = (self.own if self.own is not None else self.loaded.parts(0))["stateful"]
        for name, each in self.context.settings.stateful.items():
            if name in saved:
                each.load_state_dict(_match_types(each.state_dict(), saved[name]))
            elif self.context.world.is_main:
                log.warning("%s is not in the checkpoint, so its state is not changed", name)

    def log_changes(self) -> None:
        """Log what differs between the run that saved the checkpoint and this run."""
        meta, strategy = self.loaded.meta, repr(self.context.strategy)
        if self.own is None:
            size = self.context.world.size
            log.info("%d ranks saved the checkpoint, this run has %d", self.loaded.size, size)
        if meta["strategy"] != strategy:
            log.info("saved with the strategy %s, this run uses %s", meta["strategy"], strategy)
        for name in self.dropped:
            log.warning("%s: the mode's state is dropped: it does not fit this strategy", name)


@torch.no_grad()
def _copy_matching(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy each value into the target of the same name, in place, if the shapes are equal."""
    for name, value in values.items():
        if name in targets and targets[name].shape == value.shape:
            targets[name].copy_(value)


def _match_types(current: Any, saved: Any) -> Any:
    """Return ``saved`` with dicts turned into Counters where ``current`` has a Counter."""
    if not isinstance(current, dict) or not isinstance(saved, dict):
        return saved
    state = {key: _match_types(current.get(key), value) for key, value in saved.items()}
    return Counter(state) if isinstance(current, Counter) else state


def merge_states(parts: Sequence[Any]) -> Any:
    """Return one nested state, with float tensors of equal shape averaged over the states.

    Other values are the first's. A key that only some states have is merged over these states.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        alike = all(isinstance(p, Tensor) and p.shape == first.shape for p in parts)
        if not first.is_floating_point() or not alike:
            return first
        if all(torch.equal(p, first) for p in parts[1:]):
            return first  # a mean could differ by rounding
        return torch.stack([p.double() for p in parts]).mean(0).to(first.dtype)
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: merge_states([part[key] for part in parts if key in part]) for key in keys}
    if isinstance(first, tuple | list) and all(len(p) == len(first) for p in parts):
        return type(first)(merge_states(list(column)) for column in zip(*parts, strict=True))
    return first


def _merge_optimizers(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge all ranks' optimizer states. Stages are united, and replicas are averaged."""
    groups = [
        {**alike[0], "params": list(dict.fromkeys(n for group in alike for n in group["params"]))}
        for alike in zip(*(state["groups"] for state in states), strict=True)
    ]
    merged = merge_states([state["state"] for state in states])
    return {**states[0], "groups": groups, "state": merged}


def _to_device(value: Any, device: torch.device) -> Any:
    """Return a nested state with all tensors moved to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_to_device(item, device) for item in value)
    return value
