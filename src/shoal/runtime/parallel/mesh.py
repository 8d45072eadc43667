"""Make the device mesh of a partition: pipeline x replica x shard x tensor ranks.

The names of the axes and their order are torchtitan's: ``pp, dp_replicate, dp_shard, tp``. Tensor
ranks exchange most, so they are neighbours. Pipeline stages exchange least, so they are furthest
apart. The mesh always has all four axes. An axis that is not used has size one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.axes.partition import Partition

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def mesh(partition: Partition, world_size: int) -> DeviceMesh:
    """Return the mesh of ``partition`` over all ranks. The process group must exist.

    Raises:
        UsageError: the degrees of the partition do not fit ``world_size`` ranks.
    """
    replicas = partition.replicas(world_size)
    sizes = (partition.pipe, replicas, partition.shard, partition.tensor)
    on_cuda = torch.cuda.is_available() and "nccl" in dist.get_backend()
    return init_device_mesh("cuda" if on_cuda else "cpu", sizes, mesh_dim_names=AXES)


def data_index(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (index, count) of this rank's share of every batch, for the loader.

    Replicas, and ZeRO shards inside a replica, each have their own samples. The tensor ranks and
    pipeline stages of a shard work on the same samples.
    """
    replica, shard = mesh["dp_replicate"], mesh["dp_shard"]
    index = replica.get_local_rank() * shard.size() + shard.get_local_rank()
    return index, replica.size() * shard.size()
