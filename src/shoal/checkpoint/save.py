"""Save a checkpoint: plan, write and fsync the data files, rename them, write the manifest last."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import commit
from shoal.checkpoint.files.commit import PendingSave
from shoal.checkpoint.files.directory import check_path
from shoal.checkpoint.files.manifest import Manifest
from shoal.checkpoint.group import CheckpointGroup
from shoal.checkpoint.state import SaveOptions, State
from shoal.errors import BadArgument, CheckpointError

_log = logging.getLogger(__name__)
_MANIFEST_NBYTES = 1 << 16  # estimated size of a manifest without chunks
_ENTRY_NBYTES = 512  # estimated size of one chunk's entry in a manifest


def save(
    root: str | os.PathLike[str], state: State, *, step: int, options: SaveOptions | None = None
) -> Path:
    """Save ``state`` under ``root`` and return the directory of the new checkpoint.

    All workers of ``options.group`` must call this, and ``root`` must be on a filesystem that they
    share. No earlier checkpoint is changed before the new one is complete. ``step`` is the number
    of steps done; saving a step again replaces its checkpoint atomically.

    Raises:
        CheckpointError: a worker failed. All workers raise the error of the lowest such rank.
        BadArgument: a worker's own argument is wrong. This worker raises it instead.
    """
    from shoal.checkpoint.dcp.plan import nbytes_of, plan_writes
    from shoal.checkpoint.dcp.write import StateWriter

    options = options or SaveOptions()
    group = CheckpointGroup(options.group, options.timeout_seconds)
    writer = group.run("flatten", lambda: StateWriter(state, group.rank))
    token, directory = group.gather("check", lambda: _check(root, step))[0]
    pending = PendingSave(Path(directory), step, token)
    main = group.rank == 0
    with contextlib.ExitStack() as lock:
        try:
            plans, alias = plan_writes(writer.planner, group.gather("plan", writer.describe))
            nbytes = sum(nbytes_of(plan) + _ENTRY_NBYTES * len(plan.items) for plan in plans)
            group.run("open", lambda: _open(pending, nbytes, lock) if main else None)
            group.run("see", lambda: _check_visible(pending))

            def write() -> dict[str, Any]:
                with commit.disk_space(pending.root, nbytes):
                    return writer.write(pending.data_file(group.rank), plans[group.rank])

            manifest = writer.manifest(step, group.gather("write", write), alias)
            group.run("commit", lambda: _commit(pending, manifest) if main else None)
        except BaseException:
            if main:
                pending.roll_back()  # after a failed phase no other rank writes any more
            raise
        if main:
            try:
                commit.prune(pending, options.keep)
            except OSError as error:  # only a warning, because the new checkpoint is complete
                _log.warning("could not delete old checkpoints in %s: %s", pending.root, error)
    return pending.path


def _check(root: str | os.PathLike[str], step: int) -> tuple[str, str]:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise BadArgument(f"save(step={step!r})", "step must be a whole number >= 0 and < 10**18")
    return secrets.token_hex(8), str(check_path(root).absolute())


def _open(pending: PendingSave, nbytes: int, lock: contextlib.ExitStack) -> None:
    commit.make_root(pending.root)
    lock.enter_context(commit.locked(pending.root))
    commit.sweep(pending)
    with commit.disk_space(pending.root, nbytes + _MANIFEST_NBYTES):
        os.mkdir(pending.temporary)


def _check_visible(pending: PendingSave) -> None:
    if not pending.temporary.is_dir():
        why = f"this worker does not see the directory that rank 0 made in {pending.root}"
        raise CheckpointError(f"{why}; use a filesystem that all workers share")


def _commit(pending: PendingSave, manifest: Manifest) -> None:
    with commit.disk_space(pending.root, _MANIFEST_NBYTES):
        commit.commit(pending, manifest)
