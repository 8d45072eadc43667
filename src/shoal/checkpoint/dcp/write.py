"""Write one rank's state: flatten it, plan with all ranks, write the data file, make the manifest.

DCP's own storage writer uses pickle, so :class:`RankFileWriter` replaces it.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shoal.checkpoint.dcp.plan import check_savable, describe
from shoal.checkpoint.files.manifest import Chunk, Manifest, TensorEntry, chunk_of
from shoal.checkpoint.files.raw import dense, dtype_name, view_bytes, write_all
from shoal.checkpoint.state import State
from shoal.checkpoint.tree import flatten
from shoal.errors import BadArgument, CheckpointError


class StateWriter:
    """One rank's state, flattened, and the DCP planner of its tensors.

    Raises:
        BadArgument: a value cannot be saved; names it.
    """

    def __init__(self, state: State, rank: int) -> None:
        self.shared, shared_tensors = flatten(state.shared, "shared")
        self.mine, mine_tensors = flatten(state.mine, f"rank{rank}")
        self.meta, meta_tensors = flatten(state.meta, "meta")
        if meta_tensors:
            raise BadArgument(next(iter(meta_tensors)), "meta holds no tensors: use shared or mine")
        check_savable(shared_tensors, allow_sharded=True)
        check_savable(mine_tensors, allow_sharded=False)
        self._tensors = [shared_tensors, mine_tensors]
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.planner.set_up_planner({**shared_tensors, **mine_tensors}, None, rank == 0)

    def describe(self) -> dict[str, Any]:
        """Return the description of this rank's tensors for :func:`plan_writes`."""
        return describe(self.planner, self.shared, self._tensors)

    def write(self, file: Path, plan: SavePlan) -> dict[str, Any]:
        """Write this rank's data file; return its part of the manifest as JSON."""
        results = RankFileWriter(file).write_data(self.planner.finish_plan(plan), self.planner)
        chunks = [[r.index.fqn, asdict(r.storage_data)] for r in results.wait()]
        types = {
            item.index.fqn: [
                dtype_name(item.tensor_data.properties.dtype),
                list(item.tensor_data.size),
            ]
            for item in plan.items
            if item.tensor_data is not None
        }
        return {"file": file.name, "chunks": chunks, "kinds": types, "mine": self.mine}

    def manifest(self, step: int, parts: list[dict[str, Any]], alias: dict[str, str]) -> Manifest:
        """Combine what :meth:`write` returned on all ranks."""
        types: dict[str, Any] = {}
        chunks: dict[str, list[Chunk]] = {}
        files: dict[str, int] = {}
        for part in parts:
            types |= part["kinds"]
            files[part["file"]] = sum(chunk["nbytes"] for _, chunk in part["chunks"])
            for name, chunk in part["chunks"]:
                chunks.setdefault(name, []).append(chunk_of(chunk))
        tensors = {
            name: TensorEntry(dtype, tuple(shape), tuple(chunks[name]))
            for name, (dtype, shape) in types.items()
        }
        return Manifest(
            step=step,
            size=len(parts),
            files=files,
            tensors=tensors,
            alias=alias,
            shared=self.shared,
            ranks=tuple(part["mine"] for part in parts),
            meta=self.meta,
            written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


class RankFileWriter(StorageWriter):
    """DCP storage that writes one rank's part of the plan to one file, without a manifest."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is no state between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and fsync; the ``storage_data`` of each result is a :class:`Chunk`."""
        done: Future[list[WriteResult]] = Future()
        fd = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            done.set_result(self._write(fd, plan, planner))
            os.fsync(fd)
        finally:
            os.close(fd)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: :mod:`shoal.checkpoint.save` writes the manifest."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path."""
        return True

    def _write(self, fd: int, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results, at = [], 0
        for item in plan.items:
            values = planner.resolve_data(item)
            if not isinstance(values, Tensor) or item.index.offset is None:
                raise CheckpointError(f"{item.index.fqn} is not a tensor")
            values = dense(values)
            crc = write_all(fd, view := view_bytes(values))
            sizes, stride = tuple(values.shape), values.stride()
            offsets = tuple(item.index.offset)
            chunk = Chunk(self.file.name, at, len(view), crc, offsets, sizes, stride)
            results.append(WriteResult(item.index, len(view), chunk))
            at += len(view)
        return results
