"""Who is who: ranks laid out as pipeline x replica x shard x tensor.

The names and their order are torchtitan's, ``pp, dp_replicate, dp_shard, tp``: tensor ranks, which
talk most, are neighbours; pipeline stages, which talk least, lie furthest apart. All four are
always there, of size one where a model is not cut that way, so nobody asks which exist.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.errors import UsageError

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


class Degrees(Protocol):
    """How often a model is cut each way; ``data=None`` means as many replicas as there is room."""

    @property
    def data(self) -> int | None: ...
    @property
    def shard(self) -> int: ...
    @property
    def tensor(self) -> int: ...
    @property
    def pipe(self) -> int: ...


def mesh(partition: Degrees, world_size: int, *, device: str | None = None) -> DeviceMesh:
    """The mesh of ``partition`` over all ranks; the process group must exist.

    Args:
        partition: the degrees.
        world_size: ranks there are.
        device: "cpu" or "cuda"; by default what the process group's backend serves.

    Raises:
        UsageError: the degrees do not multiply to ``world_size``.
    """
    data = replicas(partition, world_size)
    sizes = (partition.pipe, data, partition.shard, partition.tensor)
    return init_device_mesh(device or _device(), sizes, mesh_dim_names=AXES)


def replicas(partition: Degrees, world_size: int) -> int:
    """How many replicas of the model ``world_size`` ranks hold."""
    degrees = {"shard": partition.shard, "tensor": partition.tensor, "pipe": partition.pipe}
    ranks = prod(degrees.values())  # of one replica
    data = partition.data or world_size // ranks
    if data >= 1 and data * ranks == world_size:
        return data
    shown = {"data": partition.data, **degrees} if partition.data else degrees
    product = " x ".join(f"{name}={degree}" for name, degree in shown.items())
    total = prod(shown.values())  # type: ignore[arg-type]  # no None among them: see above
    must = "is not" if partition.data else "does not divide"
    fits = [n for n in (world_size // ranks * ranks, (world_size // ranks + 1) * ranks) if n]
    raise UsageError(
        f"partition {product} = {total} ranks on {world_size}: because {total} {must} {world_size};"
        f" instead: {' or '.join(str(n) for n in dict.fromkeys(fits))} ranks"
        f"{' with data left out' if partition.data else ''}, or degrees whose product"
        f" {'is' if partition.data else 'divides'} {world_size}"
    )


def data_index(mesh: DeviceMesh) -> tuple[int, int]:
    """Which share of every batch this rank computes, as (index, count), for the loader.

    Replicas and, inside a replica, ZeRO shards each see samples of their own; tensor ranks and
    pipeline stages work together on the same ones.
    """
    replica, shard = mesh["dp_replicate"], mesh["dp_shard"]
    index = replica.get_local_rank() * shard.size() + shard.get_local_rank()
    return index, replica.size() * shard.size()


def _device() -> str:
    serves_cuda = torch.cuda.is_available() and "nccl" in dist.get_backend()
    return "cuda" if serves_cuda else "cpu"
