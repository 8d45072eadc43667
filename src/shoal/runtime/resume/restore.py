"""Take up a run where a checkpoint left it: on the same workers exactly, on others nearly.

Everything is checked before anything is overwritten. On the same number of workers, cut alike, each
gets its own back. On others the model is the agreed one, the order of samples goes on, optimizers
and residuals are the mean of the old ones, and generators stay as the script seeded them.

What several workers remembered, as one memory: for a run that goes on with other workers.

Everybody gets the mean of what the old ones remembered. What reaches the model is the mean of all
workers' residuals, and that stays the same.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint.tree import flatten
from shoal.errors import CheckpointMismatch, CheckpointMissing
from shoal.runtime.resume.save import (
    buffers_of,
    group_of,
    memory_of,
    place_feed,
    place_of,
    where,
)
from shoal.runtime.resume.state import (
    State,
    check_optimizer,
    load_model,
    load_optimizer,
    model_layout,
    parameters_of,
)
from shoal.runtime.step.replica import Replica
from shoal.wire.server import ServerWire

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded
    from shoal.runtime.run import Run

log = logging.getLogger("shoal")
FACTS = {"strategy", "memory", "agrees", "steps", "feeds"}


def restore(run: Run, path: str | PathLike[str] | None = None) -> bool:
    """Load the newest good checkpoint; for other workers what was remembered is re-dealt."""
    from shoal import checkpoint

    root = where(run, path)
    try:
        loaded = checkpoint.load(root, rank=run.rank, size=run.size, group=group_of(run))
    except CheckpointMissing:
        if path is not None:
            raise
        return False
    if lacking := FACTS - set(loaded.meta):
        raise CheckpointMismatch(f"{loaded.path} was not saved by a run: no {min(lacking)} in it")
    past = Restorer(run, loaded)
    past.check()
    run.drain()
    for name, replica in run.replicas.items():
        past.put(name, replica)
    past.put_stateful()
    run.steps = int(loaded.meta["steps"])
    run.saved.at, run.saved.due, run.saved.loaded = run.steps, False, loaded
    run.saved.rng = past.mine["rng"] if past.mine is not None else None
    for feed in run.feeds:
        place_feed(run, feed)
    if run.size > 1 and not run.context.strategy.synchrony.waits:
        dist.barrier()  # or a peer that is ready would move a model that is not yet restored
    if run.is_main:
        log.info("restored step %d from %s", run.steps, loaded.path)
        past.tell()
    return True


def restore_now(run: Run, path: str | PathLike[str] | None = None) -> bool:
    """As :func:`restore`, and random numbers go on at once: somebody asked for it at this line."""
    from shoal import checkpoint

    found = restore(run, path)
    if run.saved.rng is not None:
        checkpoint.set_rng_state(run.saved.rng)
    return found


class Restorer:
    """A checkpoint as one run sees it.

    Args:
        run: that goes on.
        loaded: what was saved.
    """

    def __init__(self, run: Run, loaded: Loaded) -> None:
        self.run = run
        self.loaded = loaded
        self.mine: Mapping[str, Any] | None = loaded.mine
        self.dropped: list[str] = []
        self._parts: list[Mapping[str, Any]] = []
        self._optimizers: dict[str, State] = {}

    def check(self) -> None:
        """Refuse what does not fit, before anything is overwritten."""
        from shoal import checkpoint

        for name, replica in self.run.replicas.items():
            checkpoint.match(model_layout(replica.source), self.loaded, under=name)
            state = self._optimizers[name] = self._optimizer(name, replica)
            check_optimizer(replica.optimizer, parameters_of(replica.source), state)
        for feed, state in zip(self.run.feeds, self.loaded.meta["feeds"], strict=False):
            feed.check(state)

    def _optimizer(self, name: str, replica: Replica) -> State:
        shared: State | None = self.loaded.shared.get(f"{name} optimizer")
        if shared is not None:
            return shared
        if self._own is not None and (self.loaded.meta["agrees"] or not replica.mode.agrees):
            own: State = self._own[name]["optimizer"]
            return own
        return joined([part[name]["optimizer"] for part in self.parts()])

    @property
    def _own(self) -> Mapping[str, Any] | None:
        """What I held myself, if I hold the same part now."""
        alike = self.loaded.meta["memory"][-1] == memory_of(self.run)[-1]
        return self.mine if alike else None

    def parts(self) -> list[Mapping[str, Any]]:
        """What all workers had of their own, read once."""
        if not self._parts:
            self._parts = [self.loaded.parts(rank) for rank in range(self.loaded.size)]
        return self._parts

    @torch.no_grad()
    def put(self, name: str, replica: Replica) -> None:
        """Model, optimizer and memory of one replica."""
        load_model(replica.source, self.loaded.shared[name])
        state = self._optimizers[name]
        if replica.served is not None:
            self._serve(replica, replica.served, state)
            state = {**state, "state": {}}  # the servers' optimizer is the one that steps
        load_optimizer(replica.optimizer, parameters_of(replica.source), state)
        memory = self._memory(name, replica)
        if self._own is not None:
            own = self._own[name]
            _fill(buffers_of(replica), own["buffers"])
            if memory and not replica.mode.agrees:
                _fill(replica.source.trainable(), own.get("parameters", {}))
        replica.mode.load_state_dict(moved(memory, self.run.device))

    def _serve(self, replica: Replica, wire: ServerWire, state: State) -> None:
        from shoal.runtime.remote.client import give

        dist.barrier()  # nobody pushes any more
        if self.run.rank == 0:
            give(wire, replica.source.trainable(), state)
        dist.barrier()

    def _memory(self, name: str, replica: Replica) -> Mapping[str, Any]:
        """What the axes remember, if today's strategy can use it; else nothing."""
        saved = self.mine[name]["axes"] if self.mine is not None else self.parts()[0][name]["axes"]
        fits = set(saved) == set(replica.mode.state_dict())
        if not fits or self.loaded.meta["memory"] != memory_of(self.run):
            self.dropped += [name] if flatten(saved, name)[1] else []
            return {}
        if self.mine is not None:
            kept: Mapping[str, Any] = saved
            return kept
        place = place_of(self.run)
        alike = [part[name]["axes"] for part in self.parts() if part["place"] == place]
        blended: Mapping[str, Any] = mean_of(alike)
        return blended

    def put_stateful(self) -> None:
        """Schedulers and whatever else the script named; of other workers, rank 0's."""
        saved = (self.mine if self.mine is not None else self.loaded.parts(0))["stateful"]
        for name, held in self.run.context.settings.stateful.items():
            if name in saved:
                held.load_state_dict(_kin(held.state_dict(), saved[name]))
            elif self.run.is_main:
                log.warning("%s is not in the checkpoint: it starts anew", name)

    def tell(self) -> None:
        """Say what is not as it was."""
        meta, now = self.loaded.meta, repr(self.run.context.strategy)
        if self.mine is None:
            log.info("saved by %d workers, going on with %d", self.loaded.size, self.run.size)
        if meta["strategy"] != now:
            log.info("saved under %s, going on under %s", meta["strategy"], now)
        for name in self.dropped:
            log.warning("%s: what its old strategy remembered is dropped", name)


@torch.no_grad()
def _fill(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """What is made on the way (a cache) may not be there yet, or be larger: left alone."""
    for name, value in values.items():
        if name in targets and targets[name].shape == value.shape:
            targets[name].copy_(value)


def _kin(held: Any, saved: Any) -> Any:
    """A Counter was saved as a dict: give back what the object's own state is made of."""
    if not isinstance(held, dict) or not isinstance(saved, dict):
        return saved
    made = {key: _kin(held.get(key), value) for key, value in saved.items()}
    return Counter(made) if isinstance(held, Counter) else made


def mean_of(parts: Sequence[Any]) -> Any:
    """The mean of nested states, tensor by tensor; what is not a float is the first one's.

    What only some hold (the stages of a pipeline) is the mean over those.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        alike = all(isinstance(p, Tensor) and p.shape == first.shape for p in parts)
        if not first.is_floating_point() or not alike or _same(parts):
            return first
        return torch.stack([p.double() for p in parts]).mean(0).to(first.dtype)
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: mean_of([part[key] for part in parts if key in part]) for key in keys}
    if isinstance(first, tuple | list) and all(len(p) == len(first) for p in parts):
        return type(first)(mean_of(list(column)) for column in zip(*parts, strict=True))
    return first


def _same(parts: Sequence[Tensor]) -> bool:
    """Whether nothing needs a mean, which would round."""
    return all(torch.equal(p, parts[0]) for p in parts[1:])


def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One optimizer's state of several: stages add up, replicas are averaged."""
    first = states[0]
    groups = [
        {**kin[0], "params": list(dict.fromkeys(name for group in kin for name in group["params"]))}
        for kin in zip(*(state["groups"] for state in states), strict=True)
    ]
    return {**first, "groups": groups, "state": mean_of([state["state"] for state in states])}


def moved(value: Any, device: torch.device) -> Any:
    """A nested state on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    return value
