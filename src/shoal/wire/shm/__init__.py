"""The ``shoal`` backend of torch.distributed: collectives at memory speed inside a node.

Top down: ``backend`` is what torch sees, ``rendezvous`` connects the ranks, ``multinode`` works
between nodes, ``node`` inside a node, ``memory`` holds what they share. Importing this package
loads neither torch nor the backend; the first group does.
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
