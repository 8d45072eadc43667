"""What a process group is called, and which rank of how many it is.

torch finds a group by its name. The C++ forms of these questions want a backend written in C++.

What every part of the process group stands on: its order of work, and its end.

torch asks a group for its device types and backend, and takes it down; the C++ forms of these want
a backend written in C++, so they are answered here, as its names are in ``identity``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.errors import PeerLost, UsageError
from shoal.wire.shm.backend.work import Lane, Work
from shoal.wire.shm.memory.barrier import entitled
from shoal.wire.shm.memory.reduce_ops import spell
from shoal.wire.shm.transports import Place

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


Options = Any  # torch's own options, one class a collective, all with asyncOp


@lru_cache(maxsize=1024)
def title(name: str, dtype: torch.dtype, numel: int) -> bytes:
    """What ranks compare before a collective, and what errors show."""
    return entitled(f"{name} of {spell(dtype, numel)}")


class Base(Identity):
    """A process group without any collective.

    Args:
        store: of the group.
        rank: of this process in the group.
        size: how many ranks.
        place: from ``connect``.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, store: Store, rank: int, size: int, *, place: Place) -> None:
        super().__init__(rank, size)
        self._store, self._pid = store, os.getpid()
        self._wire, self._post, self._board = place.wire, place.post, place.wire.board
        self._order = 0
        self._lane = Lane(self._board)
        parts = self._lane, self._post, self._board
        self._end = weakref.finalize(self, _close, self._pid, *parts)
        self._end.atexit = False

    def _do(
        self, task: Callable[[], None], outputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        """Have a collective done, in the order of calls; now, unless it may be waited for later."""
        self._require_open()
        self._order += 1
        return self._lane.do(task, outputs, background=getattr(opts, "asyncOp", True))

    def _require_open(self) -> None:
        """Raise if the group is another process's, or has been destroyed."""
        if self._pid != os.getpid():
            raise UsageError(
                f"this group belongs to process {self._pid}, of which process {os.getpid()} is a "
                "fork; make a new group here"
            )
        if self._lane.stopped:
            raise UsageError(f"group {self.group_name!r} has been destroyed; make a new one")

    def get_group_store(self) -> Store:
        """The store the group was made with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether torch may ask the backend for memory; it has its own way (``allocate``)."""
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._order

    def _set_sequence_number_for_group(self) -> None:
        """Every group counts from zero."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long to wait for other ranks."""
        self._board.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Take leave of the group: end its threads, let go of its memory."""
        self._end()

    def abort(self) -> None:
        """Give up at once: the others are told, and so is whoever waits here."""
        if self._pid == os.getpid():
            self._board.fail(PeerLost("the group was aborted"))
        self._end()


def _close(pid: int, lane: Lane, post: Any, board: Any) -> None:
    if pid != os.getpid():  # a fork has neither the threads, nor a part in the group
        return
    lane.stop()
    post.stop()
    board.leave()
