"""One worker made of several ranks: ZeRO shards, tensor parallel ranks and pipeline stages.

FSDP2, DTensor and torch's pipelining do the work; this package applies them in the right order.
Their traffic is exact and stays inside a worker. The other axes of a strategy decide the exchange
between workers, over :attr:`ParallelModel.replica_group`, of :meth:`ParallelModel.local_gradients`.

The runtime imports this package only for a strategy that partitions a model, because it loads FSDP2
and DTensor.
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
