"""One worker made of several ranks: ZeRO shards, tensor ranks and pipeline stages.

Nothing of this is written here but the order: FSDP2, DTensor and torch's pipelining do the work.
Their traffic is exact and stays inside a worker; what the other axes speak of is the exchange
between workers, over :attr:`Placed.replica_group`, of :meth:`Placed.local_gradients`.

This package imports FSDP2 and DTensor: the runtime loads it only for a strategy that cuts a model.
"""

from shoal.runtime.partitioned.mesh import data_index, mesh
from shoal.runtime.partitioned.pipe import Pipeline
from shoal.runtime.partitioned.place import Placed, place
from shoal.runtime.partitioned.state import clip, full_state, global_norm, load_full

__all__ = [
    "Pipeline",
    "Placed",
    "clip",
    "data_index",
    "full_state",
    "global_norm",
    "load_full",
    "mesh",
    "place",
]
