"""Save: plan, write beside, fsync, rename, manifest last, prune; on any error leave no trace."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.files import directory
from shoal.checkpoint.files.commit import Draft, commit, prune, sweep
from shoal.checkpoint.files.manifest import Manifest, TensorEntry, chunk_of
from shoal.checkpoint.files.raw import dtype_name
from shoal.checkpoint.group import CheckpointGroup
from shoal.checkpoint.state import SaveOptions, State
from shoal.checkpoint.tree import flatten
from shoal.errors import BadArgument, CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

_log = logging.getLogger(__name__)
_MANIFEST_NBYTES = 1 << 16  # and about this much for each tensor
_ENTRY_NBYTES = 512


def save(
    root: str | os.PathLike[str], state: State, *, step: int, options: SaveOptions | None = None
) -> Path:
    """Save ``state`` under ``root``; every worker of ``options.group`` calls this.

    Until it returns the previous checkpoint stays what it was; if one worker fails, all raise.

    Args:
        root: the directory of checkpoints, on a filesystem that all workers share.
        state: what to save.
        step: after how many steps; saving a step again replaces it, atomically.
        options: how many to keep, and who saves together.

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: on all workers, with the reason of the one that failed.
    """
    options = options or SaveOptions()
    team = CheckpointGroup(options.group, options.timeout_seconds)
    work = _Work.of(state, team)
    token, place = team.together("check", lambda: _check(root, step))[0]
    draft = Draft(Path(place), step, token)
    with contextlib.ExitStack() as stack, _cleaning(draft, team):
        plans, alias = work.plan(team)
        nbytes = [work.nbytes(plan) for plan in plans]
        team.together("open", lambda: _open(draft, team, sum(nbytes), stack))
        team.together("see", lambda: _see(draft))
        written = team.together(
            "write", lambda: work.write(draft.file(team.rank), plans[team.rank], nbytes)
        )
        manifest = work.manifest(step, written, alias)
        team.together("commit", lambda: _commit(draft, manifest) if team.rank == 0 else None)
        if team.rank == 0:
            _tidy(draft, options.keep)
    return draft.path


@dataclass
class _Work:
    """One worker's state, taken apart."""

    shared: Any
    mine: Any
    meta: Any
    groups: list[dict[str, Tensor]]
    planner: DefaultSavePlanner

    @classmethod
    def of(cls, state: State, team: CheckpointGroup) -> _Work:
        """Flatten and check; all workers learn of what cannot be saved."""
        found: list[_Work] = []
        team.together("flatten", lambda: found.append(cls._of(state, team.rank)))
        return found[0]

    @classmethod
    def _of(cls, state: State, rank: int) -> _Work:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        from shoal.checkpoint.dcp.plan import check

        shared, shared_tensors = flatten(state.shared, "shared")
        mine, mine_tensors = flatten(state.mine, f"rank{rank}")
        meta, meta_tensors = flatten(state.meta, "meta")
        if meta_tensors:
            raise BadArgument(next(iter(meta_tensors)), "meta holds no tensors: use shared or mine")
        check(shared_tensors, sharded=True)
        check(mine_tensors, sharded=False)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({**shared_tensors, **mine_tensors}, None, rank == 0)
        return cls(shared, mine, meta, [shared_tensors, mine_tensors], planner)

    def plan(self, team: CheckpointGroup) -> tuple[list[SavePlan], dict[str, str]]:
        """Everyone's part of the work, and which names are tied."""
        from shoal.checkpoint.dcp.plan import agree, message

        told = team.together("plan", lambda: message(self.planner, self.shared, self.groups))
        plans, alias = agree(self.planner, told)
        return plans, alias

    def nbytes(self, plan: SavePlan) -> int:
        """How much a worker will write."""
        from shoal.checkpoint.dcp.plan import nbytes_of

        return nbytes_of(plan) + _ENTRY_NBYTES * len(plan.items)

    def write(self, file: Path, plan: SavePlan, nbytes: list[int]) -> dict[str, Any]:
        """Write this worker's file; tell what went where."""
        from shoal.checkpoint.dcp.storage import RankFileWriter

        with directory.room(file.parent.parent, sum(nbytes)):
            results = RankFileWriter(file).write_data(self.planner.finish_plan(plan), self.planner)
        chunks = [[r.index.fqn, asdict(r.storage_data)] for r in results.wait()]
        items = {item.index.fqn: item.tensor_data for item in plan.items}
        kinds = {
            name: [dtype_name(data.properties.dtype), list(data.size)]
            for name, data in items.items()
            if data is not None
        }
        return {"file": file.name, "chunks": chunks, "kinds": kinds, "mine": self.mine}

    def manifest(self, step: int, written: list[dict[str, Any]], alias: dict[str, str]) -> Manifest:
        """What all have written, as one."""
        kinds: dict[str, Any] = {}
        chunks: dict[str, list[Any]] = {}
        files: dict[str, int] = {}
        for part in written:
            kinds |= part["kinds"]
            files[part["file"]] = sum(chunk["nbytes"] for _, chunk in part["chunks"])
            for name, chunk in part["chunks"]:
                chunks.setdefault(name, []).append(chunk_of(chunk))
        tensors = {
            name: TensorEntry(dtype, tuple(shape), tuple(chunks[name]))
            for name, (dtype, shape) in kinds.items()
        }
        return Manifest(
            step=step,
            size=len(written),
            files=files,
            tensors=tensors,
            alias=alias,
            shared=self.shared,
            ranks=tuple(part["mine"] for part in written),
            meta=self.meta,
            written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def _check(root: str | os.PathLike[str], step: int) -> tuple[str, str]:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
        raise BadArgument(f"save(step={step!r})", "a step is a whole number from 0")
    return secrets.token_hex(8), str(directory.checked(root).absolute())


def _open(draft: Draft, team: CheckpointGroup, nbytes: int, stack: contextlib.ExitStack) -> None:
    if team.rank != 0:
        return
    directory.make_root(draft.root)
    stack.enter_context(directory.locked(draft.root))
    sweep(draft)
    with directory.room(draft.root, nbytes + _MANIFEST_NBYTES):
        os.mkdir(draft.temporary)


def _see(draft: Draft) -> None:
    if not draft.temporary.is_dir():
        why = "another worker's directory is not seen here: use a filesystem that all share"
        raise CheckpointError(f"{draft.root}: {why}")


def _commit(draft: Draft, manifest: Manifest) -> None:
    with directory.room(draft.root, _MANIFEST_NBYTES):
        commit(draft, manifest)


def _tidy(draft: Draft, keep: int) -> None:
    try:
        prune(draft, keep)
    except OSError as error:  # the new checkpoint is safe: leftovers are no reason to stop
        _log.warning("could not remove old checkpoints in %s: %s", draft.root, error)


@contextlib.contextmanager
def _cleaning(draft: Draft, team: CheckpointGroup) -> Iterator[None]:
    """Leave nothing of a save that failed; nobody writes any more when the error is out."""
    try:
        yield
    except BaseException:
        if team.rank == 0:
            shutil.rmtree(draft.temporary, ignore_errors=True)
            draft.withdraw()
        raise
