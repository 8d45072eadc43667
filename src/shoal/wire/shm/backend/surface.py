"""What a process group is called, and which rank of how many it is.

torch finds a group by its name. The C++ forms of these questions want a backend written in C++.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# torch declares each method several times over, in forms that nothing calls on a Python group
_TorchGroup: Any = dist.ProcessGroup


class Identity(_TorchGroup):  # type: ignore[misc]
    """A process group that only knows who it is.

    Args:
        rank: of this process in the group.
        size: how many ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # the form with a store cannot be subclassed
        self._shape, self._names = (rank, size), ("", "undefined")

    def rank(self) -> int:
        """Of this process in the group; torch's own way to ask costs microseconds."""
        return self._shape[0]

    def size(self) -> int:
        """How many ranks."""
        return self._shape[1]

    def getBackendName(self) -> str:
        """Asked for by torch's C++ side."""
        return "shoal"

    def name(self) -> str:
        """Of the backend."""
        return "shoal"

    @property
    def group_name(self) -> Any:
        """What torch registers the group under."""
        return self._names[0]

    def _set_group_name(self, name: str) -> None:
        self._names = (name, self._names[1])

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._names[1]

    def _set_group_desc(self, desc: str) -> None:
        self._names = (self._names[0], desc)
