"""Decide when a run saves and restores its checkpoints.

A saved loader continues behind the last batch that it has yielded. So ``run.save`` must be called
after the step on that batch. In a loop over a loader, automatic saves wait until the loop asks for
the next batch. At that time all models of the run are updated, schedulers have stepped, and each
batch is trained exactly once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shoal.errors import CheckpointError, CheckpointMissing, UsageError
from shoal.runtime.context import RunContext
from shoal.runtime.step.batches import RunLoader, RunPosition
from shoal.runtime.step.replica import Replica
from shoal.runtime.world import env
from shoal.runtime.world.error_context import ErrorContext

if TYPE_CHECKING:
    from shoal.checkpoint import Loaded

log = logging.getLogger("shoal")


class Checkpointer:
    """Saves and restores a run, by default in the ``checkpoint`` directory of its settings.

    Args:
        drain: a function that finishes pending updates of all models.

    Attributes:
        random_state: the state of the random generators to set at the next loop or step, or None.
    """

    def __init__(
        self,
        context: RunContext,
        replicas: Mapping[str, Replica],
        position: RunPosition,
        *,
        drain: Callable[[], None],
    ) -> None:
        self.context, self.replicas, self.position = context, replicas, position
        self.random_state: dict[str, Any] | None = None
        self._drain = drain
        self._directory = context.settings.checkpoint
        self._last_step: int | None = None  # the step that was saved or restored last
        self._due = False  # whether a save waits until the loop asks for the next batch
        self._loaded: Loaded | None = None

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Save the run and return the checkpoint's path. All ranks must call this together."""
        from shoal import checkpoint
        from shoal.runtime.resume.snapshot import snapshot

        root = self._root(path)
        self._drain()
        state = snapshot(self.context, self.replicas, self.position)
        options = checkpoint.SaveOptions(keep=self.context.settings.keep, group=self._group())
        written = checkpoint.save(root, state, step=self.position.steps, options=options)
        self._last_step, self._due = self.position.steps, False
        return written

    def restore(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Load the newest undamaged checkpoint, in place. All ranks must call this together.

        If there is no checkpoint, raise if ``path`` is given, otherwise return False.
        """
        from shoal import checkpoint
        from shoal.runtime.resume.snapshot import Restorer

        world, root = self.context.world, self._root(path)
        try:
            loaded = checkpoint.load(root, rank=world.rank, size=world.size, group=self._group())
        except CheckpointMissing:
            if path is not None:
                raise
            return False
        restorer = Restorer(self.context, loaded)
        restorer.check(self.replicas, self.position.loaders)
        self._drain()
        for name, replica in self.replicas.items():
            restorer.restore(name, replica)
        restorer.restore_stateful()
        self.position.steps = int(loaded.meta["steps"])
        self._last_step, self._due, self._loaded = self.position.steps, False, loaded
        self.random_state = restorer.own["rng"] if restorer.own is not None else None
        for loader in self.position.loaders:
            self._place(loader)
        if world.size > 1 and not self.context.strategy.synchrony.waits:
            dist.barrier()  # otherwise a peer could change a model before its restore
        if world.is_main:
            log.info("restored step %d from %s", self.position.steps, loaded.path)
            restorer.log_changes()
        return True

    def restore_random_state(self, *, keep: bool = False) -> None:
        """Set the random generators to the state in the restored checkpoint, if there is one.

        The first batch or step after a restore calls this. The script may create data from a
        seeded generator before, and gets the same data as in the first run. With ``keep``
        the state is set once more at the next batch or step.
        """
        if self.random_state is not None:
            from shoal import checkpoint

            checkpoint.set_rng_state(self.random_state)
            if not keep:
                self.random_state = None

    def add_loader(self, loader: RunLoader) -> None:
        """Add a loader to the run. After a restore, move it to its saved position."""
        self.position.loaders.append(loader)
        self._place(loader)

    def _place(self, loader: RunLoader) -> None:
        """Set the callbacks of a loader, and move the k-th loader to the k-th saved position."""
        loader.step = self.position.steps
        loader.on_start, loader.on_batch_done = self.restore_random_state, self._save_due
        if self._loaded is not None:
            saved = self._loaded.meta["feeds"]
            index = self.position.loaders.index(loader)
            if index < len(saved):
                loader.load_state_dict(saved[index])

    def save_if_due(self) -> None:
        """If ``every`` divides the number of steps, save now or before the loop's next batch."""
        settings = self.context.settings
        if settings.checkpoint is None or self.position.steps % settings.every:
            return
        self._due = True
        self._warn_of_later_checkpoints()
        if not any(loader.busy for loader in self.position.loaders):
            self._save_due()

    def _warn_of_later_checkpoints(self) -> None:
        """Before the first save, warn if the directory has a later checkpoint of another run."""
        if self._last_step is not None or not self.context.world.is_main:
            return
        from shoal import checkpoint

        newest = checkpoint.newest(self._directory or ".")
        if newest is not None and int(newest.name.rpartition("-")[2]) > self.position.steps:
            log.warning(
                "another run saved %s, which is later than this run: --resume would continue from "
                "that checkpoint; use a separate directory for each run",
                newest,
            )

    def _save_due(self) -> None:
        """Save if a save is due. If it fails, log the error and go on, as the next may succeed."""
        if not self._due:
            return
        self._due = False
        try:
            with ErrorContext(self.context.world, self.position.steps, "save"):
                self.save()
        except CheckpointError as error:
            if self.context.world.is_main:
                step = self.position.steps
                log.error("step %d was not saved, but training continues: %s", step, error)

    def save_last(self) -> None:
        """Save at the end of the run, unless nothing was trained since the last save."""
        steps = self.position.steps
        if self._directory is not None and self._last_step != steps and steps:
            self._due = True
            self._save_due()

    def resume(self) -> None:
        """Restore the newest checkpoint after ``--resume`` or a restart by the launcher."""
        if os.environ.get(env.RESUME) != "1":
            return
        if self._directory is None:
            if self.context.world.env.generation > 0:  # a restart of a run without checkpoints
                return
            raise UsageError(
                "--resume cannot restore, because there is no checkpoint directory: name one with "
                "shoal run --checkpoint or distribute(checkpoint=...)"
            )
        if not self.restore() and self.context.world.is_main:
            log.info("%s has no checkpoint: the run starts at step 0", self._directory)

    def _root(self, path: str | os.PathLike[str] | None) -> Path:
        """Return ``path``, or the run's own directory if ``path`` is None."""
        root = path if path is not None else self._directory
        if root is None:
            options = "run.save(path), distribute(checkpoint=...) or shoal run --checkpoint"
            raise UsageError(f"there is no checkpoint directory: name one with {options}")
        return Path(root)

    def _group(self) -> dist.ProcessGroup | None:
        """Return the process group that saves and loads together, or None for a single rank."""
        return dist.group.WORLD if self.context.world.size > 1 else None
