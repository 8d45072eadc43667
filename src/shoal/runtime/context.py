"""What the replicas of one run have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch.distributed as dist

from shoal.runtime.settings import Settings
from shoal.runtime.step.modes import ReplicaIndex
from shoal.runtime.world.join import World
from shoal.samples.order import DataShard
from shoal.strategy import Strategy
from shoal.timeline.record import Recorder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class RunContext:
    """The workers of a run, as one of them sees them.

    Args:
        world: all ranks.
        strategy: what they do.
        settings: how.
        recorder: my spans.
        mesh: the ranks' places, where a replica is cut; else None.
    """

    world: World
    strategy: Strategy
    settings: Settings
    recorder: Recorder
    mesh: DeviceMesh | None = None

    @cached_property
    def replica_index(self) -> ReplicaIndex:
        """Which worker (replica) this is, of how many."""
        if self.mesh is None:
            return ReplicaIndex(self.world.rank, self.world.size)
        axis = self.mesh["dp_replicate"]
        return ReplicaIndex(axis.get_local_rank(), axis.size())

    @cached_property
    def data_shard(self) -> DataShard:
        """Which part of the data is mine."""
        if self.mesh is None:
            return DataShard(self.world.rank, self.world.size)
        from shoal.runtime.parallel import data_index

        return DataShard(*data_index(self.mesh), stands_in=True)

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """Who agrees: the same part of all replicas; None is everybody."""
        return None if self.mesh is None else self.mesh["dp_replicate"].get_group()
