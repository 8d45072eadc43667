"""Fill tensors from a checkpoint: fresh ones, or those of a template, sharded as they are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from shoal.checkpoint.dcp.plan import tied
from shoal.checkpoint.dcp.storage import ManifestReader
from shoal.checkpoint.files.manifest import Manifest, TensorEntry
from shoal.checkpoint.files.raw import DTYPES, row_major
from shoal.checkpoint.match import differ
from shoal.checkpoint.state import Nested
from shoal.checkpoint.tree import flatten, unflatten
from shoal.errors import CheckpointMismatch


def check_template(into: Nested, manifest: Manifest, where: str) -> None:
    """Refuse a template that the checkpoint does not fit, before anything is overwritten.

    Raises:
        CheckpointMismatch: naming the first tensor that is absent, or differs.
    """
    _, targets = flatten(into, "shared")
    for name, target in targets.items():
        if name not in manifest.tensors and name not in manifest.alias:
            raise CheckpointMismatch(f"{_bare(name)}: the model has it, {where} has not")
        entry = manifest.entry(name)
        saved = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        differ(_bare(name), target, saved, where)
    alias, _ = tied(targets)
    for name, first in alias.items():
        if manifest.alias.get(name, name) != manifest.alias.get(first, first):
            text = f"{_bare(name)} and {_bare(first)} are tied in the model, but not in {where}"
            raise CheckpointMismatch(text)


def fill(path: Path, manifest: Manifest, tree: Any, into: Nested | None) -> Any:
    """The tree with its tensors, read from the checkpoint; tied ones are one tensor again."""
    names: dict[str, None] = {}
    unflatten(tree, lambda name: names.setdefault(name))
    given = {} if into is None else flatten(into, "shared")[1]
    targets: dict[str, Tensor] = {}
    for name in names:
        source = manifest.alias.get(name, name)
        if name in given and not _is_plain_meta(given[name]):
            targets[name] = given[name]
        elif source not in targets:
            targets[source] = _fresh(manifest.tensors[source])
    _read_into(targets, ManifestReader(path, manifest))
    return unflatten(tree, lambda name: targets[name if name in targets else manifest.alias[name]])


def _read_into(targets: dict[str, Tensor], reader: ManifestReader) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _fresh(entry: TensorEntry) -> Tensor:
    whole = entry.chunks[0].sizes == entry.shape
    stride = entry.chunks[0].stride if whole else row_major(entry.shape)
    return torch.empty_strided(entry.shape, stride, dtype=DTYPES[entry.dtype])


def _is_plain_meta(tensor: Tensor) -> bool:
    return tensor.is_meta and not isinstance(tensor, DTensor)


def _bare(name: str) -> str:
    return name.removeprefix("shared/")
