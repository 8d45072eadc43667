"""Who is who: ranks laid out as pipeline x replica x shard x tensor.

The names and their order are torchtitan's, ``pp, dp_replicate, dp_shard, tp``: tensor ranks, which
talk most, are neighbours; pipeline stages, which talk least, lie furthest apart. All four are
always there, of size one where a model is not cut that way, so nobody asks which exist.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.axes.partition import Partition

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def mesh(partition: Partition, world_size: int, *, device: str | None = None) -> DeviceMesh:
    """The mesh of ``partition`` over all ranks; the process group must exist.

    Args:
        partition: the degrees.
        world_size: ranks there are.
        device: "cpu" or "cuda"; by default what the process group's backend serves.

    Raises:
        UsageError: the degrees do not multiply to ``world_size``.
    """
    replicas = partition.replicas(world_size)
    sizes = (partition.pipe, replicas, partition.shard, partition.tensor)
    return init_device_mesh(device or _device(), sizes, mesh_dim_names=AXES)


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
