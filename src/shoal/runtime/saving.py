"""What a run saves and how it takes up again.

Shared by all workers: the agreed model and, where all hold the same, the optimizer. Each worker's
own: what its axes remember, its random state, its buffers and, where replicas differ, its replica.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CheckpointMissing, UsageError
from shoal.runtime.launcher import contract
from shoal.runtime.replica import Replica
from shoal.runtime.state import load_model, load_optimizer, model_state, optimizer_state

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded
    from shoal.runtime.feed import Feed
    from shoal.runtime.run import Run

log = logging.getLogger("shoal")


def save(run: Run, path: Any = None) -> Path:
    """Save a run; all workers call it together."""
    from shoal import checkpoint

    root = _root(run, path)
    run.drain()
    shared: dict[str, Any] = {}
    mine: dict[str, Any] = {"rng": checkpoint.rng_state()}
    for name, replica in run.replicas.items():
        with replica.agreed():
            shared[name] = model_state(replica.source)
        mine[name] = _own(replica)
        if replica.mode.agrees and replica.pipeline is None:
            shared[f"{name} optimizer"] = optimizer_state(replica.optimizer, replica.source)
        else:
            mine[name]["optimizer"] = optimizer_state(replica.optimizer, replica.source)
    facts = {
        "strategy": repr(run.team.strategy),
        "steps": run.steps,
        "workers": run.size,
        "feeds": [feed.state_dict() for feed in run.feeds],
        "torch": torch.__version__,
    }
    group = dist.group.WORLD if run.size > 1 else None
    options = checkpoint.Options(keep=run.team.settings.keep, group=group)
    return checkpoint.save(
        root, checkpoint.State(shared, mine, facts), step=run.steps, options=options
    )


def _own(replica: Replica) -> dict[str, Any]:
    own: dict[str, Any] = {"axes": replica.mode.state_dict(), "buffers": _buffers(replica)}
    if not replica.mode.agrees:
        own["parameters"] = {n: t.detach() for n, t in replica.source.trainable().items()}
    return own


def _buffers(replica: Replica) -> dict[str, Tensor]:
    return dict(replica.model.named_buffers())


def _root(run: Run, path: Any) -> Path:
    root = path if path is not None else run.team.settings.checkpoint
    if root is None:
        raise UsageError(
            "where to? give run.save(path), distribute(checkpoint=...) or shoal run --checkpoint"
        )
    return Path(root)


def save_if_due(run: Run) -> None:
    """Save every so many steps, where a directory was given."""
    settings = run.team.settings
    if settings.checkpoint is not None and run.steps % settings.every == 0:
        save(run)


def restore(run: Run, path: Any = None) -> bool:
    """Load the newest good checkpoint; for other workers what was remembered is re-dealt."""
    from shoal import checkpoint

    root = _root(run, path)
    group = dist.group.WORLD if run.size > 1 else None
    try:
        loaded = checkpoint.load(root, rank=run.rank, size=run.size, group=group)
    except CheckpointMissing:
        if path is not None:
            raise
        return False
    for name, replica in run.replicas.items():
        checkpoint.match(model_state(replica.source), loaded, under=name)
    run.drain()
    mine = loaded.mine if loaded.mine is not None else _blend(loaded)
    for name, replica in run.replicas.items():
        load_model(replica.source, loaded.shared[name])
        state = loaded.shared.get(f"{name} optimizer") or mine[name].get("optimizer")
        if state is not None:
            load_optimizer(replica.optimizer, replica.source, state)
        _take_own(replica, mine[name], same=loaded.mine is not None)
    if loaded.mine is not None:
        checkpoint.set_rng_state(loaded.mine["rng"])
    run.steps = int(loaded.meta["steps"])
    run.resumed = loaded
    for feed in run.feeds:
        place_feed(run, feed)
    log.info("restored step %d from %s", run.steps, loaded.path)
    return True


@torch.no_grad()
def _take_own(replica: Replica, mine: Mapping[str, Any], *, same: bool) -> None:
    if same:
        buffers = dict(replica.model.named_buffers())
        for name, value in mine["buffers"].items():
            buffers[name].copy_(value)
        targets = replica.source.trainable()
        for name, value in mine.get("parameters", {}).items():
            targets[name].copy_(value)
    replica.mode.load_state_dict(mine["axes"])


def _blend(loaded: Loaded) -> dict[str, Any]:
    """Another number of workers: everybody gets the mean of what the old ones remembered.

    The mean of residuals over workers, which is what will reach the model, stays the same.
    """
    parts = [loaded.parts(rank) for rank in range(loaded.size)]
    blended: dict[str, Any] = mean_of(parts)
    return blended


def mean_of(parts: list[Any]) -> Any:
    """The mean of nested states, tensor by tensor; what is not a float is the first one's."""
    first = parts[0]
    if isinstance(first, Tensor):
        alike = all(p.shape == first.shape for p in parts)
        if not first.is_floating_point() or not alike:
            return first
        return torch.stack([p.double() for p in parts]).mean(0).to(first.dtype)
    if isinstance(first, Mapping):
        return {key: mean_of([part[key] for part in parts if key in part]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(mean_of(list(column)) for column in zip(*parts, strict=True))
    return first


def place_feed(run: Run, feed: Feed) -> None:
    """Put a loader where the checkpoint left it: the k-th loader of the script, the k-th saved."""
    feed.number = run.steps
    if run.resumed is None:
        return
    saved = run.resumed.meta.get("feeds", [])
    index = run.feeds.index(feed)
    if index < len(saved):
        feed.load_state_dict(saved[index])


def resume(run: Run) -> None:
    """``shoal run --resume``, or a restart: take up the newest checkpoint if there is one."""
    if os.environ.get(contract.RESUME) == "1" and run.team.settings.checkpoint is not None:
        found = restore(run)
        if not found and run.is_main:
            log.info("nothing to resume in %s: starting anew", run.team.settings.checkpoint)


def write_timeline(run: Run) -> None:
    """Leave my spans where the launcher collects them."""
    directory = os.environ.get(contract.DIRECTORY)
    if directory:
        facts = {
            "strategy": repr(run.team.strategy),
            "workers": run.size,
            "model": ", ".join(type(r.model).__name__ for r in run.replicas.values()),
        }
        run.team.recorder.write(directory, facts)
