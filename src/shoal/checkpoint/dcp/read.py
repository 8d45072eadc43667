"""Read the tensors of a checkpoint: into new tensors, or into those of a template.

DCP's planner computes which parts of which chunks a template needs, however its DTensors are
sharded now. DCP's own storage reader uses pickle, so :class:`ManifestReader` replaces it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shoal.checkpoint.dcp.plan import find_tied
from shoal.checkpoint.files.directory import DataFiles
from shoal.checkpoint.files.manifest import Manifest, TensorEntry
from shoal.checkpoint.files.raw import DTYPES, row_major
from shoal.checkpoint.match import require_same_type
from shoal.checkpoint.state import Nested
from shoal.checkpoint.tree import flatten, unflatten
from shoal.errors import CheckpointMismatch


def check_template(into: Nested, manifest: Manifest, where: str) -> None:
    """Raise if the checkpoint does not fit the template, before anything is overwritten.

    Raises:
        CheckpointMismatch: names the first tensor that is absent or differs.
    """
    _, targets = flatten(into, "shared")
    for name, target in targets.items():
        shown = name.removeprefix("shared/")
        if name not in manifest.tensors and name not in manifest.alias:
            raise CheckpointMismatch(f"{shown}: the model has it, {where} does not")
        entry = manifest.entry(name)
        saved = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        require_same_type(shown, target, saved, where)
    alias, _ = find_tied(targets)
    for name, first in alias.items():
        if manifest.alias.get(name, name) != manifest.alias.get(first, first):
            pair = f"{name.removeprefix('shared/')} and {first.removeprefix('shared/')}"
            raise CheckpointMismatch(f"{pair} are tied in the model, but not in {where}")


def fill(path: Path, manifest: Manifest, tree: Any, into: Nested | None) -> Any:
    """Return the tree with its tensors read from the checkpoint; tied names get one tensor."""
    names: dict[str, None] = {}
    unflatten(tree, lambda name: names.setdefault(name))
    template = {} if into is None else flatten(into, "shared")[1]
    targets: dict[str, Tensor] = {}
    for name in names:
        source = manifest.alias.get(name, name)
        target = template.get(name)
        if target is not None and (isinstance(target, DTensor) or not target.is_meta):
            targets[name] = target
        elif source not in targets:
            targets[source] = _empty(manifest.tensors[source])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = ManifestReader(path, manifest)
    planner.set_up_planner(targets, reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return unflatten(tree, lambda name: targets[name if name in targets else manifest.alias[name]])


def _empty(entry: TensorEntry) -> Tensor:
    one_chunk = entry.chunks[0].sizes == entry.shape
    stride = entry.chunks[0].stride if one_chunk else row_major(entry.shape)
    return torch.empty_strided(entry.shape, stride, dtype=DTYPES[entry.dtype])


class ManifestReader(StorageReader):
    """DCP storage that reads the chunks of a manifest and checks the CRC-32 of each."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as DCP's metadata; a tied name has its own entry."""
        names = [*self.manifest.tensors, *self.manifest.alias]
        return Metadata({name: _metadata(self.manifest.entry(name)) for name in names})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, reading each chunk once."""
        by_chunk: dict[tuple[str, int], list[ReadItem]] = {}
        for item in plan.items:
            key = (item.storage_index.fqn, item.storage_index.index or 0)
            by_chunk.setdefault(key, []).append(item)
        with DataFiles(self.path, self.manifest) as files, torch.no_grad():
            for (name, index), items in by_chunk.items():
                entry = self.manifest.entry(name)
                values = files.read(name, entry, entry.chunks[index])
                for item in items:
                    _copy(values, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path."""
        return True


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
