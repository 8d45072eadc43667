"""Load: find, verify every byte, then fill; walk back to the previous if the newest is damaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
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
    """Load a checkpoint; every worker of ``group`` calls this, and all get the same one.

    Args:
        path: one checkpoint (``…/step-00000120``), or the directory of many, of which the newest
            sound one is taken; whether it is one that was damaged is logged.
        rank: this worker.
        size: how many workers there are now.
        group: whose workers agree which checkpoint is sound; None for one process.
        into: a template of ``shared``: its tensors are filled in place, DTensors with their
            shards, however it was cut when saved.

    Raises:
        CheckpointMissing: there is none.
        CheckpointCorrupt: that one, or every one, is damaged; names file and tensor.
        CheckpointMismatch: a tensor of ``into`` is absent or has another shape or dtype.
    """
    if not 0 <= rank < size:
        raise BadArgument(f"load(rank={rank}, size={size})", "rank must lie in [0, size)")
    team = CheckpointGroup(group)
    places = team.together("find", lambda: [str(p) for p in _candidates(path)])[0]
    found, manifest = _first_sound([Path(place) for place in places], team)
    team.together("fit", lambda: _check_fit(found, manifest, into))
    holder: list[Loaded] = []
    team.together("read", lambda: holder.append(_read(found, manifest, rank, size, into)))
    return holder[0]


def _candidates(path: str | os.PathLike[str]) -> list[Path]:
    try:
        root = directory.checked(path).absolute()
    except CheckpointMissing:
        raise
    except CheckpointError as error:
        raise CheckpointMissing(str(error)) from error
    if not root.exists():
        raise CheckpointMissing(f"{root} does not exist")
    if not root.is_dir():
        raise CheckpointMissing(f"{root} is a file: a checkpoint is a directory")
    if directory.step_of(root) is not None or (root / NAME).is_file():
        return [root]
    if not (found := directory.steps(root)):
        raise CheckpointMissing(f"{root} holds no checkpoint: no directory step-00000000 or such")
    return found


def _first_sound(places: list[Path], team: CheckpointGroup) -> tuple[Path, Manifest]:
    """The first that every worker finds sound; what is wrong with those before it is logged."""
    failures: list[CheckpointError] = []
    for place in places:
        held: list[Manifest] = []
        try:
            team.together("verify", partial(_verify, place, team, held))
        except (CheckpointCorrupt, CheckpointMissing) as error:
            failures.append(error)
            continue
        for failure in failures if team.rank == 0 else []:
            step = held[0].step
            _log.warning("using previous checkpoint step %d because %s", step, failure)
        return place, held[0]
    kind = CheckpointMissing if _all_missing(failures) else CheckpointCorrupt
    raise kind("; ".join(str(failure) for failure in failures)) from failures[0]


def _all_missing(failures: list[CheckpointError]) -> bool:
    return all(isinstance(failure, CheckpointMissing) for failure in failures)


def _verify(path: Path, team: CheckpointGroup, held: list[Manifest]) -> None:
    """Check the manifest, and the CRC-32 of this worker's share of all chunks."""
    from shoal.checkpoint.dcp.storage import Files

    manifest = directory.read_manifest(path)
    if (step := directory.step_of(path)) is not None and step != manifest.step:
        raise CheckpointCorrupt(f"{path / NAME}: of step {manifest.step}, in a directory of {step}")
    chunks = list(manifest.chunks())[team.rank :: team.size]
    with Files(path, manifest) as files:
        for name, chunk in chunks:
            files.verify(name, chunk)
    held.append(manifest)


def _check_fit(path: Path, manifest: Manifest, into: Nested | None) -> None:
    if into is not None:
        from shoal.checkpoint.dcp.read import check_template

        check_template(into, manifest, str(path))


def _read(path: Path, manifest: Manifest, rank: int, size: int, into: Nested | None) -> Loaded:
    from shoal.checkpoint.dcp.read import fill

    parts = _parts(path, manifest)
    return Loaded(
        shared=fill(path, manifest, manifest.shared, into),
        mine=parts(rank) if size == manifest.size else None,
        meta=fill(path, manifest, manifest.meta, None),
        step=manifest.step,
        path=path,
        size=manifest.size,
        parts=parts,
    )


def _parts(path: Path, manifest: Manifest) -> Callable[[int], Nested]:
    def part(rank: int) -> Nested:
        from shoal.checkpoint.dcp.read import fill

        if not 0 <= rank < manifest.size:
            why = f"{manifest.size} workers saved this checkpoint"
            raise BadArgument(f"parts({rank})", f"{why}: give a rank from 0 to {manifest.size - 1}")
        found: Nested = fill(path, manifest, manifest.ranks[rank], None)
        return found

    return part
