"""The ``shoal`` backend of torch.distributed: collectives through shared memory inside a node.

From top to bottom, ``backend`` is the interface to torch, ``rendezvous`` connects
the ranks, ``multinode`` communicates between nodes, ``node`` communicates inside a node, and
``memory`` manages the shared memory. Importing this package loads neither torch nor the backend.
The backend is loaded with the first group, or when ``ShoalGroup`` or ``allocate`` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.wire.shm.backend.registration import register, why_not

if TYPE_CHECKING:
    from shoal.wire.shm.backend.process_group import ShoalGroup, allocate

__all__ = ["ShoalGroup", "allocate", "register", "why_not"]


def __getattr__(name: str) -> Any:
    if name in ("ShoalGroup", "allocate"):
        from shoal.wire.shm.backend import process_group

        return getattr(process_group, name)
    raise AttributeError(f"module 'shoal.wire.shm' has no attribute {name!r}")
