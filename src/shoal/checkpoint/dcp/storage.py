"""torch.distributed.checkpoint's storage without its pickles: one file of bytes for each worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shoal.checkpoint.files.directory import open_data
from shoal.checkpoint.files.manifest import Chunk, Manifest, TensorEntry
from shoal.checkpoint.files.raw import DTYPES, crc_of, dense, read_all, view_bytes, write_all
from shoal.errors import CheckpointCorrupt, CheckpointError


class RankFileWriter(StorageWriter):
    """Writes a worker's part of the plan to its one file; the manifest is for the caller."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and fsync; each result carries its :class:`Chunk`."""
        done: Future[list[WriteResult]] = Future()
        fd = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            done.set_result(self._write(fd, plan, planner))
            os.fsync(fd)
        finally:
            os.close(fd)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The manifest is written by :mod:`shoal.checkpoint.save`, once all agree."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
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


class ManifestReader(StorageReader):
    """Reads what a manifest describes; every chunk's CRC-32 is checked on the way."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in torch's words; a tied name has an entry of its own."""
        names = [*self.manifest.tensors, *self.manifest.alias]
        return Metadata({name: _metadata(self.manifest.entry(name)) for name in names})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, reading each chunk once."""
        wanted: dict[tuple[str, int], list[ReadItem]] = {}
        for item in plan.items:
            key = (item.storage_index.fqn, item.storage_index.index or 0)
            wanted.setdefault(key, []).append(item)
        with Files(self.path, self.manifest) as files, torch.no_grad():
            for (name, index), items in wanted.items():
                entry = self.manifest.entry(name)
                values = files.read(name, entry, entry.chunks[index])
                for item in items:
                    _copy(values, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


class Files:
    """The data files of a checkpoint, each opened once, so none can be swapped halfway."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._open: dict[str, int] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        self._open.clear()

    def read(self, name: str, entry: TensorEntry, chunk: Chunk) -> Tensor:
        """The values of one chunk, in the strides it was saved with."""
        count = chunk.nbytes // DTYPES[entry.dtype].itemsize
        flat = torch.empty(count, dtype=DTYPES[entry.dtype])
        view = view_bytes(flat)
        self._check(name, chunk, lambda fd: read_all(fd, view, chunk.at))
        return flat.as_strided(chunk.sizes, chunk.stride)

    def verify(self, name: str, chunk: Chunk) -> None:
        """Read a chunk only for its CRC-32."""
        self._check(name, chunk, lambda fd: crc_of(fd, chunk.at, chunk.nbytes))

    def _check(self, name: str, chunk: Chunk, read: Callable[[int], int]) -> None:
        file = self.path / chunk.file
        try:
            crc = read(self._descriptor(chunk.file))
        except (EOFError, OSError) as error:
            raise CheckpointCorrupt(f"{file}: tensor {name}: {error}") from error
        if crc != chunk.crc32:
            why = f"its CRC-32 is {crc:08x}, written was {chunk.crc32:08x}"
            raise CheckpointCorrupt(f"{file}: tensor {name}: {why}")

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            fd = open_data(self.path / name, self.manifest.files[name])
            self._open[name] = fd
            self._closing.callback(os.close, fd)
        return self._open[name]


def _copy(values: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        values = values.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(values)
    planner.commit_tensor(item, target)


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks
    ]
    properties = TensorProperties(dtype=DTYPES[entry.dtype])
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
