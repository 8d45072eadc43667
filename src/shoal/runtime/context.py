"""The context that all parts of a run use: ranks, strategy, settings, timeline recorder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from shoal.runtime.settings import Settings
from shoal.runtime.world import env
from shoal.runtime.world.world import World
from shoal.samples.order import DataShard
from shoal.strategy import Strategy
from shoal.timeline.record import Recorder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ReplicaIndex(NamedTuple):
    """The index of this worker, and the number of workers. A worker is a replica on >= 1 ranks."""

    worker: int
    workers: int


@dataclass(frozen=True)
class RunContext:
    """The context of a run on this rank."""

    world: World
    strategy: Strategy
    settings: Settings
    recorder: Recorder  # records this rank's timeline
    mesh: DeviceMesh | None = None  # the mesh of all ranks; None if the model is not sharded

    @cached_property
    def replica_index(self) -> ReplicaIndex:
        """The index of this worker, and the number of workers."""
        if self.mesh is None:
            return ReplicaIndex(self.world.rank, self.world.size)
        axis = self.mesh["dp_replicate"]
        return ReplicaIndex(axis.get_local_rank(), axis.size())

    @cached_property
    def data_shard(self) -> DataShard:
        """The part of the data that this rank reads."""
        if self.mesh is None:
            return DataShard(self.world.rank, self.world.size)
        from shoal.runtime.parallel import data_index

        return DataShard(*data_index(self.mesh), stands_in=True)

    @cached_property
    def copies(self) -> int:
        """How many ranks read the same samples, which is tensor ranks times pipeline stages."""
        return self.world.size // self.data_shard.count

    def write_timeline(self, model: str) -> None:
        """Write this rank's timeline if a launcher started it. ``model`` is the models' names."""
        directory = os.environ.get(env.DIRECTORY)
        if directory:
            facts = {"strategy": repr(self.strategy), "workers": self.world.size, "model": model}
            self.recorder.write(directory, facts)

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of every replica. None means all ranks."""
        return None if self.mesh is None else self.mesh["dp_replicate"].get_group()
