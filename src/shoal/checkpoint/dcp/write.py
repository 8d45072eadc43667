"""Write one rank's state: flatten it, describe it, write its data file, and make the manifest.

DCP's own storage writer uses pickle, so this module writes the data file.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from shoal.checkpoint.dcp.plan import check_savable, describe
from shoal.checkpoint.files.manifest import Chunk, Manifest, TensorEntry, chunk_of
from shoal.checkpoint.files.raw import dense, dtype_name, view_bytes, write_all
from shoal.checkpoint.state import State
from shoal.checkpoint.tree import flatten
from shoal.errors import BadArgument, CheckpointError


class StateWriter:
    """The flattened state of one rank, and the DCP planner for its tensors.

    Raises:
        BadArgument: a value cannot be saved; the message names it.
    """

    def __init__(self, state: State, rank: int) -> None:
        self.shared, shared_tensors = flatten(state.shared, "shared")
        self.mine, mine_tensors = flatten(state.mine, f"rank{rank}")
        self.meta, meta_tensors = flatten(state.meta, "meta")
        if meta_tensors:
            raise BadArgument(
                next(iter(meta_tensors)), "put tensors in shared or mine, not in meta"
            )
        check_savable(shared_tensors, allow_sharded=True)
        check_savable(mine_tensors, allow_sharded=False)
        self._tensors = [shared_tensors, mine_tensors]
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.planner.set_up_planner({**shared_tensors, **mine_tensors}, None, rank == 0)

    def describe(self) -> dict[str, Any]:
        """Return the description of this rank's tensors for :func:`plan_writes`."""
        return describe(self.planner, self.shared, self._tensors)

    def write(self, file: Path, plan: SavePlan) -> dict[str, Any]:
        """Write this rank's data file; return this rank's part of the manifest as JSON values."""
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            chunks = self._write_chunks(fd, file.name, self.planner.finish_plan(plan))
            os.fsync(fd)
        finally:
            os.close(fd)
        types = {
            item.index.fqn: [dtype_name(data.properties.dtype), list(data.size)]
            for item in plan.items
            if (data := item.tensor_data) is not None
        }
        return {"file": file.name, "chunks": chunks, "kinds": types, "mine": self.mine}

    def _write_chunks(self, fd: int, file: str, plan: SavePlan) -> list[tuple[str, Any]]:
        """Write the tensors of the plan one after another; return (name, chunk) of each."""
        chunks: list[tuple[str, Any]] = []
        offset = 0
        for item in plan.items:
            values = self.planner.resolve_data(item)
            if not isinstance(values, Tensor) or item.index.offset is None:
                raise CheckpointError(f"{item.index.fqn} is not a tensor")
            values = dense(values)
            crc = write_all(fd, view := view_bytes(values))
            position = tuple(item.index.offset), tuple(values.shape), values.stride()
            chunks.append((item.index.fqn, asdict(Chunk(file, offset, len(view), crc, *position))))
            offset += len(view)
        return chunks

    def manifest(self, step: int, parts: list[dict[str, Any]], alias: dict[str, str]) -> Manifest:
        """Return the manifest. ``parts`` has the result of :meth:`write` of each rank."""
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
