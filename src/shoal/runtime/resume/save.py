"""When a run saves, and what: model, optimizer, memory of the axes, random state, data position.

Shared by all workers: the agreed model and, where all hold the same, the optimizer. Each worker's
own: what its axes remember, its random state, its buffers and, where replicas differ, its replica.

A batch counts as trained once it was yielded. So ``run.save`` belongs between two batches (after
the step), and automatic saves wait until the loop asks for the next one: then all models of the run
were updated and schedulers have stepped, and each batch is trained exactly once. Gradients that no
update has used yet are not saved.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CheckpointError, UsageError
from shoal.runtime.loss import plain
from shoal.runtime.remote.client import fetch
from shoal.runtime.resume.state import copied, model_state, optimizer_state, parameters_of
from shoal.runtime.step.model import ShardedModel
from shoal.runtime.step.replica import Replica
from shoal.runtime.world import env as contract
from shoal.runtime.world.error_context import ErrorContext

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded
    from shoal.runtime.run import Run
    from shoal.runtime.step.batches import RunLoader

log = logging.getLogger("shoal")


@dataclass
class Saved:
    """Where a run stands with its checkpoints.

    Attributes:
        at: the step last saved or restored.
        due: a save is to come as soon as the batch at hand is done with.
        loaded: what was restored.
        rng: the random state to go on with at the next batch or step.
    """

    at: int | None = None
    due: bool = False
    loaded: Loaded | None = None
    rng: dict[str, Any] | None = None


def save(run: Run, path: str | os.PathLike[str] | None = None) -> Path:
    """Save a run; all workers call it together."""
    from shoal import checkpoint

    root = where(run, path)
    run.drain()
    shared: dict[str, Any] = {}
    mine: dict[str, Any] = {"rng": checkpoint.rng_state(), "place": place_of(run)}
    for name, replica in run.replicas.items():
        own = mine[name] = {}
        with replica.agreed():
            state = model_state(replica.source)
            # outside, the replica is itself again, and so would be what was not copied
            stays = replica.mode.agrees and not any(True for _ in replica.model.buffers())
            shared[name] = state if stays else copied(state)
            _put_optimizer(replica, name, shared, own)
        _put_own(replica, own)
    stateful = run.context.settings.stateful
    mine["stateful"] = {name: held.state_dict() for name, held in stateful.items()}
    whole = checkpoint.State(shared, mine, _facts(run))
    options = checkpoint.SaveOptions(keep=run.context.settings.keep, group=group_of(run))
    found = checkpoint.save(root, whole, step=run.steps, options=options)
    run.saved.at, run.saved.due = run.steps, False
    return found


def _put_optimizer(
    replica: Replica, name: str, shared: dict[str, Any], own: dict[str, Any]
) -> None:
    """Where all hold the same it is shared; stages and replicas that differ keep their own.

    What is cut is saved whole, for then it fits any other cut.
    """
    named = parameters_of(replica.source)
    if replica.served is not None:
        state = optimizer_state(replica.optimizer, named)
        shared[f"{name} optimizer"] = fetch(replica.served, state)
    elif replica.agrees and replica.pipeline is None:
        shared[f"{name} optimizer"] = optimizer_state(replica.optimizer, named)
    else:
        own["optimizer"] = optimizer_state(replica.optimizer, named, whole=True)


def _put_own(replica: Replica, own: dict[str, Any]) -> None:
    own["axes"] = replica.mode.state_dict()
    own["buffers"] = buffers_of(replica)
    if not replica.mode.agrees:
        own["parameters"] = {n: t.detach() for n, t in replica.source.trainable().items()}


def buffers_of(replica: Replica) -> dict[str, Tensor]:
    """My buffers by name, those too that a state_dict leaves out."""
    named = {plain(n): b for n, b in replica.model.named_buffers()}
    if not isinstance(replica.source, ShardedModel):
        return named
    from shoal.runtime.parallel.parallelize import local

    return {name: local(b) for name, b in named.items()}


def _facts(run: Run) -> dict[str, Any]:
    return {
        "strategy": repr(run.context.strategy),
        "memory": memory_of(run),
        "agrees": all(replica.mode.agrees for replica in run.replicas.values()),
        "steps": run.steps,
        "workers": run.size,
        "feeds": [feed.state_dict() for feed in run.feeds],
        "torch": torch.__version__,
    }


def memory_of(run: Run) -> list[str]:
    """On what the form of an axis' memory depends: compressor, slices, and the cut (last)."""
    s = run.context.strategy
    cut = f"shard({s.partition.shard}) tensor({s.partition.tensor}) pipe({s.partition.pipe})"
    return [repr(s.compression), repr(s.scheduling) if s.scheduling.slices else "", cut]


def place_of(run: Run) -> list[int]:
    """Which part of a replica is mine: what is alike in its place may be averaged."""
    mesh = run.context.mesh
    return (
        [] if mesh is None else [mesh[axis].get_local_rank() for axis in ("pp", "dp_shard", "tp")]
    )


def where(run: Run, path: str | os.PathLike[str] | None) -> Path:
    """The directory given, or the run's own."""
    root = path if path is not None else run.context.settings.checkpoint
    if root is None:
        raise UsageError(
            "where to? give run.save(path), distribute(checkpoint=...) or shoal run --checkpoint"
        )
    return Path(root)


def group_of(run: Run) -> dist.ProcessGroup | None:
    """Who saves and loads together."""
    return dist.group.WORLD if run.size > 1 else None


def save_if_due(run: Run) -> None:
    """Every so many steps a save is due: now, or when the loop asks for its next batch."""
    settings = run.context.settings
    if settings.checkpoint is None or run.steps % settings.every:
        return
    run.saved.due = True
    _warn_of_strangers(run)
    if not any(feed.busy for feed in run.feeds):
        save_now(run)


def _warn_of_strangers(run: Run) -> None:
    """Later checkpoints of another run would be what a resume takes up."""
    if run.saved.at is not None or run.saved.loaded is not None or not run.is_main:
        return
    from shoal import checkpoint

    found = checkpoint.newest(run.context.settings.checkpoint or ".")
    if found is not None and int(found.name.rpartition("-")[2]) > run.steps:
        log.warning(
            "%s is of another run and later than this one's: --resume would take it up; "
            "give each run a directory of its own",
            found,
        )


def save_now(run: Run) -> None:
    """Do the save that is due. One that fails does not end the training: the next one may do."""
    if not run.saved.due:
        return
    run.saved.due = False
    try:
        with ErrorContext(run.context.world, run.steps, "save"):
            save(run)
    except CheckpointError as error:
        if run.is_main:
            log.error("step %d was not saved, training goes on: %s", run.steps, error)


def save_last(run: Run) -> None:
    """The run ends: what was trained since the last save is saved."""
    if run.context.settings.checkpoint is not None and run.saved.at != run.steps and run.steps:
        run.saved.due = True
        save_now(run)


def wake(run: Run) -> None:
    """The first batch or step after restoring: random numbers go on from where they were.

    Only now, so that data made after ``distribute`` from a seeded generator are the same as before.
    """
    if run.saved.rng is not None:
        from shoal import checkpoint

        checkpoint.set_rng_state(run.saved.rng)
        run.saved.rng = None


def place_feed(run: Run, feed: RunLoader) -> None:
    """Put a loader where the checkpoint left it: the k-th loader of the script, the k-th saved."""
    feed.number = run.steps
    feed.opening, feed.closing = partial(wake, run), partial(save_now, run)
    if run.saved.loaded is None:
        return
    saved = run.saved.loaded.meta["feeds"]
    index = run.feeds.index(feed)
    if index < len(saved):
        feed.load_state_dict(saved[index])


def resume(run: Run) -> None:
    """``shoal run --resume``, or a restart: take up the newest checkpoint if there is one."""
    if os.environ.get(contract.RESUME) != "1":
        return
    directory = run.context.settings.checkpoint
    if directory is None and run.context.world.generation == 0:
        raise UsageError(
            "--resume, but there is no checkpoint directory: give shoal run --checkpoint or "
            "distribute(checkpoint=...)"
        )
    if directory is None:  # a restart, which nobody prepared for
        return
    from shoal.runtime.resume.restore import restore

    found = restore(run)
    if not found and run.is_main:
        log.info("nothing to resume in %s: starting anew", directory)


def write_timeline(run: Run) -> None:
    """Leave my spans where the launcher collects them."""
    directory = os.environ.get(contract.DIRECTORY)
    if directory:
        facts: Mapping[str, Any] = {
            "strategy": repr(run.context.strategy),
            "workers": run.size,
            "model": ", ".join(type(r.model).__name__ for r in run.replicas.values()),
        }
        run.context.recorder.write(directory, facts)
