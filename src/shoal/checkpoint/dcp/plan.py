"""Plan which rank writes which part of which tensor, with DCP's planner and JSON messages.

Each rank describes its tensors to all others. Each rank then computes the same global plan, in
which a tensor that several ranks have is written by one of them, and tied tensors are written once.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from shoal.checkpoint.files.raw import DTYPES, dtype_name, why_unsavable
from shoal.errors import BadArgument, CheckpointError

Description = dict[str, Any]
"""The JSON message that describes the tensors of one rank to the others."""


def check_savable(tensors: Mapping[str, Tensor], *, allow_sharded: bool) -> None:
    """Raise a BadArgument for a tensor that cannot be saved. A DTensor needs ``allow_sharded``."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if not allow_sharded:
                raise BadArgument(name, "a DTensor belongs to several workers; put it in shared")
            if any(placement.is_partial() for placement in tensor.placements):
                raise BadArgument(name, "a partial sum cannot be saved; redistribute it first")
        if (reason := why_unsavable(_local(tensor))) is not None:
            raise BadArgument(name, reason)


def find_tied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], list[str]]:
    """Return {name: earlier name with the same memory}, and the names of tensors without memory.

    An empty shard or a meta tensor has no memory to compare, so it may or may not be tied.
    """
    first: dict[tuple[Any, ...], str] = {}
    alias: dict[str, str] = {}
    unknown: list[str] = []
    for name, tensor in tensors.items():
        part = _local(tensor)
        if part.numel() == 0 or part.is_meta:
            unknown.append(name)
            continue
        memory = (part.device, part.data_ptr(), part.dtype, tensor.shape, part.shape, part.stride())
        if (earlier := first.setdefault(memory, name)) != name:
            alias[name] = earlier
    return alias, unknown


def describe(
    planner: DefaultSavePlanner, shared: Any, tensors: list[dict[str, Tensor]]
) -> Description:
    """Return the description of this rank's tensors.

    ``shared`` is the JSON tree that must be equal on all ranks. Tied names are searched in each
    dict of ``tensors`` (shared, mine) separately. A replica in mine may share memory with the model
    of this rank, but the saved model may be written by another rank and differ from the replica.
    """
    ties = [find_tied(group) for group in tensors]
    alias = {name: first for aliases, _ in ties for name, first in aliases.items()}
    unknown = [name for _, names in ties for name in names]
    items = [_item_to_json(item) for item in planner.create_local_plan().items]
    tree = zlib.crc32(json.dumps(shared).encode())
    return {"items": items, "alias": alias, "silent": unknown, "tree": tree}


def plan_writes(
    planner: DefaultSavePlanner, descriptions: list[Description]
) -> tuple[list[SavePlan], dict[str, str]]:
    """Return the plan of every rank, and {tied name: name whose tensor is saved}."""
    _check_shared_equal(descriptions)
    alias = _common_alias(descriptions)
    plans = [
        SavePlan([_item_from_json(item) for item in d["items"] if item["fqn"] not in alias])
        for d in descriptions
    ]
    try:
        final, _ = planner.create_global_plan(plans)
    except ValueError as error:
        why = "the shards of a tensor overlap or leave gaps"
        raise CheckpointError(f"{why}: {error}") from error
    return final, alias


def nbytes_of(plan: SavePlan) -> int:
    """Return the number of bytes that a rank will write."""
    data = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(d.chunk.sizes.numel() * d.properties.dtype.itemsize for d in data)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _common_alias(descriptions: list[Description]) -> dict[str, str]:
    """Return {tied name: saved name} for ties on which all ranks with a nonempty part agree."""
    votes: dict[str, list[str | None]] = {}
    for d in descriptions:
        unknown = set(d["silent"])
        for name in dict.fromkeys(item["fqn"] for item in d["items"]):
            if name not in unknown:
                votes.setdefault(name, []).append(d["alias"].get(name))
    alias: dict[str, str] = {}
    for name, targets in votes.items():
        target = targets[0]
        if target is not None and target not in alias and len(set(targets)) == 1:
            alias[name] = target
    return alias


def _check_shared_equal(descriptions: list[Description]) -> None:
    """Raise a CheckpointError if names, dtypes, shapes or plain values in shared differ."""
    first, tree = _shared_types(descriptions[0]), descriptions[0]["tree"]
    for rank, description in enumerate(descriptions[1:], start=1):
        other = _shared_types(description)
        for name in dict.fromkeys([*first, *other]):
            a, b = first.get(name, "absent"), other.get(name, "absent")
            on_both = name in first and name in other
            # If the trees are equal, a DTensor may be absent on a rank outside of its mesh.
            if a != b and (on_both or description["tree"] != tree):
                why = f"{name} is {a} on rank 0, but {b} on rank {rank}"
                raise CheckpointError(f"shared state differs: {why}")
        if description["tree"] != tree:
            why = f"a number, string or key on rank {rank} is not equal to that of rank 0"
            raise CheckpointError(f"shared state differs: {why}; put what differs in mine")


def _shared_types(description: Description) -> dict[str, str]:
    shared = (item for item in description["items"] if item["fqn"].startswith("shared/"))
    return {item["fqn"]: f"{item['dtype']}{item['shape']}" for item in shared}


def _item_to_json(item: WriteItem) -> dict[str, Any]:
    data = item.tensor_data
    if data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    return {
        "fqn": item.index.fqn,
        "shard": item.type is WriteItemType.SHARD,
        "offsets": list(data.chunk.offsets),
        "sizes": list(data.chunk.sizes),
        "shape": list(data.size),
        "dtype": dtype_name(data.properties.dtype),
    }


def _item_from_json(item: dict[str, Any]) -> WriteItem:
    offsets = torch.Size(item["offsets"])
    return WriteItem(
        index=MetadataIndex(item["fqn"], offsets),
        type=WriteItemType.SHARD if item["shard"] else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, torch.Size(item["sizes"])),
            properties=TensorProperties(dtype=DTYPES[item["dtype"]]),
            size=torch.Size(item["shape"]),
        ),
    )
