"""Who writes which part of which tensor: torch's planner, fed with JSON instead of pickles.

Each worker tells the others what it holds; each then computes the same global plan, in which a
tensor that several hold is written by one, and a tied one once.
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
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from shoal.checkpoint.files.raw import DTYPES, dtype_name, unsavable
from shoal.errors import BadArgument, CheckpointError

Message = dict[str, Any]


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this worker holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(tensors: Mapping[str, Tensor], *, sharded: bool) -> None:
    """Refuse what cannot be saved, by name.

    Args:
        tensors: by name.
        sharded: whether DTensors may be among them.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if not sharded:
                raise BadArgument(name, "a DTensor belongs to several workers: put it in shared")
            if any(placement.is_partial() for placement in tensor.placements):
                raise BadArgument(name, "a partial sum cannot be saved: redistribute it first")
        if (why := unsavable(local_tensor(tensor))) is not None:
            raise BadArgument(name, why)


def tied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], list[str]]:
    """Which name shares the memory of which earlier one, and of which names one cannot tell."""
    first: dict[tuple[Any, ...], str] = {}
    alias: dict[str, str] = {}
    silent: list[str] = []  # an empty shard has no memory to compare
    for name, tensor in tensors.items():
        part = local_tensor(tensor)
        if part.numel() == 0 or part.is_meta:
            silent.append(name)
            continue
        place = (part.device, part.data_ptr(), part.dtype, tensor.shape, part.shape, part.stride())
        if (found := first.setdefault(place, name)) != name:
            alias[name] = found
    return alias, silent


def message(planner: DefaultSavePlanner, shared: Any, groups: list[dict[str, Tensor]]) -> Message:
    """What this worker holds: ``shared`` is the tree all must agree on.

    Tensors of different ``groups`` are never taken for tied: a replica may share memory with the
    model of its worker, yet be another value than the model saved by someone else.
    """
    alias: dict[str, str] = {}
    silent: list[str] = []
    for group in groups:
        more, unknown = tied(group)
        alias |= more
        silent += unknown
    items = [_item_json(item) for item in planner.create_local_plan().items]
    tree = zlib.crc32(json.dumps(shared).encode())
    return {"items": items, "alias": alias, "silent": silent, "tree": tree}


def agree(
    planner: DefaultSavePlanner, messages: list[Message]
) -> tuple[list[SavePlan], dict[str, str]]:
    """The plan of every worker, and which names are tied to which."""
    _check_same(messages)
    alias = _agreed_alias(messages)
    plans = [
        SavePlan([_item(item) for item in m["items"] if item["fqn"] not in alias]) for m in messages
    ]
    try:
        final, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(f"the shards of a tensor do not make it whole: {error}") from error
    return final, alias


def nbytes_of(plan: SavePlan) -> int:
    """How many bytes a worker will write."""
    total = 0
    for item in plan.items:
        if item.tensor_data is not None:
            data = item.tensor_data
            total += data.chunk.sizes.numel() * data.properties.dtype.itemsize
    return total


def _agreed_alias(messages: list[Message]) -> dict[str, str]:
    votes: dict[str, list[str | None]] = {}
    for m in messages:
        silent = set(m["silent"])
        for name in dict.fromkeys(item["fqn"] for item in m["items"]):
            if name not in silent:
                votes.setdefault(name, []).append(m["alias"].get(name))
    agreed: dict[str, str] = {}
    for name, targets in votes.items():
        target = targets[0]
        if target is not None and target not in agreed and len(set(targets)) == 1:
            agreed[name] = target
    return agreed


def _check_same(messages: list[Message]) -> None:
    """Refuse when workers hold different shared state, naming the first difference."""
    first = _described(messages[0])
    for rank, m in enumerate(messages[1:], start=1):
        other = _described(m)
        for name in dict.fromkeys([*first, *other]):
            a, b = first.get(name, "absent"), other.get(name, "absent")
            both_known = name in first and name in other
            # ranks outside of a DTensor's mesh hold no part of it
            if a != b and (both_known or m["tree"] != messages[0]["tree"]):
                raise CheckpointError(
                    f"shared state differs: {name} is {a} on rank 0, {b} on {rank}"
                )
        if m["tree"] != messages[0]["tree"]:
            why = f"a number, string or key on rank {rank} is not that of rank 0"
            raise CheckpointError(f"shared state differs: {why}; put it in mine")


def _described(m: Message) -> dict[str, str]:
    shared = (item for item in m["items"] if item["fqn"].startswith("shared/"))
    return {item["fqn"]: f"{item['dtype']}{item['shape']}" for item in shared}


def _item_json(item: WriteItem) -> dict[str, Any]:
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


def _item(item: dict[str, Any]) -> WriteItem:
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
