"""Read the tensors of a checkpoint into given tensors, or into new ones.

DCP's planner computes which parts of which chunks a given tensor needs, also for a DTensor that is
sharded differently now. DCP's own storage reader uses pickle, so this module reads the files.
"""

from __future__ import annotations

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
from torch.distributed.tensor import DTensor

from shoal.checkpoint.dcp.plan import find_tied
from shoal.checkpoint.files.directory import DataFiles
from shoal.checkpoint.files.manifest import Manifest, TensorEntry
from shoal.checkpoint.files.raw import DTYPES
from shoal.checkpoint.match import require_same_type
from shoal.checkpoint.state import Nested
from shoal.checkpoint.tree import flatten, unflatten
from shoal.errors import CheckpointMismatch


def check_into(into: Nested, manifest: Manifest, checkpoint_text: str) -> None:
    """Raise if the checkpoint cannot be loaded into ``into``. Nothing is changed.

    Raises:
        CheckpointMismatch: a tensor of ``into`` is not in the checkpoint, has another shape or
            dtype there, or is not tied there as in ``into``. The message names the tensor.
    """
    _, targets = flatten(into, "shared")
    for name, target in targets.items():
        shown = name.removeprefix("shared/")
        if name not in manifest.tensors and name not in manifest.alias:
            raise CheckpointMismatch(f"{shown} is in the model, but not in {checkpoint_text}")
        entry = manifest.entry(name)
        saved = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        require_same_type(shown, target, saved, checkpoint_text)
    alias, _ = find_tied(targets)
    for name, first in alias.items():
        if manifest.alias.get(name, name) != manifest.alias.get(first, first):
            pair = f"{name.removeprefix('shared/')} and {first.removeprefix('shared/')}"
            raise CheckpointMismatch(f"{pair} are tied in the model, but not in {checkpoint_text}")


def fill(path: Path, manifest: Manifest, tree: Any, into: Nested | None) -> Any:
    """Return the state that ``tree`` describes, with its tensors read from the checkpoint.

    The tensors of ``into`` are filled in place, except meta tensors. Any other name gets a new
    tensor, or the tensor of the name to which it was tied when saved.
    """
    names: dict[str, None] = {}
    unflatten(tree, lambda name: names.setdefault(name))
    into_tensors = {} if into is None else flatten(into, "shared")[1]
    targets: dict[str, Tensor] = {}
    for name in names:
        saved_name = manifest.alias.get(name, name)
        target = into_tensors.get(name)
        if target is not None and (isinstance(target, DTensor) or not target.is_meta):
            targets[name] = target
        elif saved_name not in targets:
            targets[saved_name] = _empty(manifest.tensors[saved_name])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # DCP must find tied names, too, because ``into`` may have a separate tensor for each name.
    all_names = (*manifest.tensors, *manifest.alias)
    metadata = Metadata({name: _metadata(manifest.entry(name)) for name in all_names})
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    with DataFiles(path, manifest) as files, torch.no_grad():
        _read_chunks(files, plan, planner)
    return unflatten(tree, lambda name: targets[name if name in targets else manifest.alias[name]])


def _empty(entry: TensorEntry) -> Tensor:
    chunk, dtype = entry.chunks[0], DTYPES[entry.dtype]
    if chunk.sizes == entry.shape:  # it is one chunk, so restore its strides (channels_last)
        return torch.empty_strided(entry.shape, chunk.stride, dtype=dtype)
    return torch.empty(entry.shape, dtype=dtype)


def _read_chunks(files: DataFiles, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Fill the tensors of the plan, reading each chunk once and checking its CRC-32."""
    by_chunk: dict[tuple[str, int], list[ReadItem]] = {}
    for item in plan.items:
        key = (item.storage_index.fqn, item.storage_index.index or 0)
        by_chunk.setdefault(key, []).append(item)
    for (name, index), items in by_chunk.items():
        entry = files.manifest.entry(name)
        values = files.read(name, entry, entry.chunks[index])
        for item in items:
            _copy(values, item, planner)


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
