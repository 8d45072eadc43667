"""One worker made of several ranks: ZeRO shards, tensor ranks and pipeline stages.

Nothing of this is written here but the order: FSDP2, DTensor and torch's pipelining do the work.
Their traffic is exact and stays inside a worker; what the other axes speak of is the exchange
between workers, over :attr:`ParallelModel.replica_group`, of :meth:`ParallelModel.local_gradients`.

This package imports FSDP2 and DTensor: the runtime loads it only for a strategy that cuts a model.
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
