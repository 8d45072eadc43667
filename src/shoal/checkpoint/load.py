"""Load a checkpoint, or the newest valid one of a directory, after verifying all its bytes."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint.files import directory
from shoal.checkpoint.files.manifest import NAME, Manifest
from shoal.checkpoint.group import CheckpointGroup
from shoal.checkpoint.state import Loaded, Nested
from shoal.errors import BadArgument, CheckpointCorrupt, CheckpointError, CheckpointMissing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    *,
    rank: int,
    size: int,
    group: ProcessGroup | None = None,
    into: Nested | None = None,
) -> Loaded:
    """Load a checkpoint. All workers of ``group`` must call this, and all load the same checkpoint.

    Args:
        path: one checkpoint (``…/step-00000120``), or a directory of checkpoints, of which the
            newest valid one is loaded. Rank 0 logs a warning for each newer one that is not valid.
        rank, size: the rank of this worker, and the number of workers that load.
        group: the workers that load together; None for a single process.
        into: the state to fill, with the structure of ``shared``. Its tensors are overwritten in
            place, except that the result has a new tensor for a meta tensor. A DTensor gets its
            shards, also if it was sharded differently when saved.

    Raises:
        CheckpointMissing: there is no checkpoint.
        CheckpointCorrupt: the checkpoint is damaged, or the directory has no valid one and at least
            one is damaged. The message names the file, and the tensor if its bytes are damaged.
        CheckpointMismatch: a tensor of ``into`` is not in the checkpoint, has another shape or
            dtype there, or is tied to another tensor in ``into`` but not in the checkpoint.
    """
    if not 0 <= rank < size:
        raise BadArgument(f"load(rank={rank}, size={size})", "rank must lie in [0, size)")
    workers = CheckpointGroup(group)
    candidates = workers.gather("find", lambda: [str(p) for p in _candidates(path)])[0]
    chosen, manifest = _first_valid([Path(candidate) for candidate in candidates], workers)
    from shoal.checkpoint.dcp.read import check_into  # importing DCP takes long

    workers.run("fit", lambda: check_into(into or {}, manifest, f"the checkpoint {chosen}"))
    return workers.run("read", lambda: _read(chosen, manifest, rank, size, into))


def _candidates(path: str | os.PathLike[str]) -> list[Path]:
    try:
        root = directory.check_path(path).absolute()
    except CheckpointMissing:
        raise
    except CheckpointError as error:
        raise CheckpointMissing(str(error)) from error
    if not root.exists():
        raise CheckpointMissing(f"{root} does not exist")
    if not root.is_dir():
        raise CheckpointMissing(f"{root} is a file, but a checkpoint is a directory")
    if directory.step_of(root) is not None or (root / NAME).is_file():
        return [root]
    if not (steps := directory.steps(root)):
        raise CheckpointMissing(f"{root} has no checkpoint: no directory such as step-00000120")
    return steps


def _first_valid(paths: list[Path], workers: CheckpointGroup) -> tuple[Path, Manifest]:
    """Return the first path that is valid on all ranks. Rank 0 logs why earlier ones are not."""
    failures: list[CheckpointError] = []
    for path in paths:
        try:
            manifest = workers.run("verify", partial(_verify, path, workers))
        except (CheckpointCorrupt, CheckpointMissing) as error:
            failures.append(error)
            continue
        for failure in failures if workers.rank == 0 else []:
            _log.warning("using previous checkpoint step %d because %s", manifest.step, failure)
        return path, manifest
    all_missing = all(isinstance(failure, CheckpointMissing) for failure in failures)
    kind = CheckpointMissing if all_missing else CheckpointCorrupt
    raise kind("; ".join(str(failure) for failure in failures)) from failures[0]


def _verify(path: Path, workers: CheckpointGroup) -> Manifest:
    """Return the manifest, after checking it and the CRC-32 of this rank's share of all chunks."""
    manifest = directory.read_manifest(path)
    if (step := directory.step_of(path)) is not None and step != manifest.step:
        why = f"it belongs to step {manifest.step}, but is in the directory of step {step}"
        raise CheckpointCorrupt(f"{path / NAME}: {why}")
    with directory.DataFiles(path, manifest) as files:
        for name, chunk in list(manifest.chunks())[workers.rank :: workers.size]:
            files.verify(name, chunk)
    return manifest


def _read(path: Path, manifest: Manifest, rank: int, size: int, into: Nested | None) -> Loaded:
    from shoal.checkpoint.dcp.read import fill

    def part(of_rank: int) -> Nested:
        if not 0 <= of_rank < manifest.size:
            why = f"{manifest.size} workers saved this checkpoint"
            hint = f"pass a rank from 0 to {manifest.size - 1}"
            raise BadArgument(f"parts({of_rank})", f"{why}: {hint}")
        state: Nested = fill(path, manifest, manifest.ranks[of_rank], None)
        return state

    return Loaded(
        shared=fill(path, manifest, manifest.shared, into),
        mine=part(rank) if size == manifest.size else None,
        meta=fill(path, manifest, manifest.meta, None),
        step=manifest.step,
        path=path,
        size=manifest.size,
        parts=part,
    )
