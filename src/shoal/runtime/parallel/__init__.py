"""Partition a model replica over ranks by ZeRO shards, tensor parallelism or pipeline stages.

This package applies FSDP2, DTensor and torch's pipelining in the right order. They communicate
uncompressed, and only between the ranks of one replica. Replicas exchange
:meth:`ParallelModel.local_gradients` over :attr:`ParallelModel.replica_group`, in the way that the
other axes of the strategy choose.

The runtime imports this package only for a strategy that partitions a model, because the import
loads FSDP2 and DTensor.
"""

from shoal.runtime.parallel.mesh import data_index, mesh
from shoal.runtime.parallel.parallelize import ParallelModel, parallelize
from shoal.runtime.parallel.pipeline import Pipeline
from shoal.runtime.parallel.state import clip, full_state, global_norm, load_full

__all__ = [
    "ParallelModel",
    "Pipeline",
    "clip",
    "data_index",
    "full_state",
    "global_norm",
    "load_full",
    "mesh",
    "parallelize",
]
