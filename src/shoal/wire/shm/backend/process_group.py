"""The ``shoal`` process group: every collective and message, over memory that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import BadArgument
from shoal.wire.shm.backend.collectives import Gathering, Reducing, Scattering
from shoal.wire.shm.backend.surface import Base
from shoal.wire.shm.backend.work import Work
from shoal.wire.shm.memory.buffers import make_bucket
from shoal.wire.shm.memory.reduce_ops import flatten, restore, writable
from shoal.wire.shm.rendezvous import Meeting
from shoal.wire.shm.transports import find_place


class Messages(Base):
    """Messages between two ranks."""

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Begin to send a tensor to a rank."""
        self._require_other(dstRank, "send to")
        return self._post.send(flatten(tensors[0], "send"), dstRank, tag=tag)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Begin to receive a tensor from a rank."""
        return self._receive(tensors[0], srcRank, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Begin to receive a tensor from whoever sends one."""
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: Tensor, peer: int | None, tag: int) -> Work:
        self._require_other(peer, "receive from")
        flat = writable(tensor, "recv")
        return self._post.receive(flat, peer, tag=tag, finally_=lambda: restore(tensor, flat))

    def _require_other(self, peer: int | None, what: str) -> None:
        self._require_open()
        if peer == self.rank():
            raise BadArgument(f"{what} rank {peer}", "that is this rank itself; copy the tensor")


class ShoalGroup(Reducing, Gathering, Scattering, Messages):
    """The process group that ``init_process_group("shoal")`` makes."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that this group's all_reduce combines in place; all ranks must call."""
        lines, buckets = self._board.lines, self._wire.buckets
        key = f"bucket/{lines.names[0]}/{len(buckets)}"
        bucket = make_bucket(
            self._store, key, numel * dtype.itemsize, rank=lines.rank, size=lines.size
        )
        buckets.append(bucket)
        return bucket.tensor(numel, dtype)


def allocate(numel: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> Tensor:
    """A flat tensor of zeros for messages of a group, in shared memory if the group has such.

    On a ``shoal`` group every rank must call this, in the same order, with the same arguments; its
    all_reduce of the tensor, or of any contiguous part, then copies nothing. On any other group it
    is an ordinary tensor. The memory is given back when group and tensor are both gone.

    Args:
        numel: how many numbers.
        dtype: of which type.
        group: the default one if None.
    """
    found = group if group is not None else dist.group.WORLD
    if isinstance(found, ShoalGroup):
        return found.allocate(numel, dtype)
    return torch.zeros(numel, dtype=dtype)


def create(options: Any, _: Any = None) -> ShoalGroup:
    """Make a group; what ``register`` gives to torch."""
    rank, size = options.group_rank, options.group_size
    names = options.global_ranks_in_group or range(size)
    meeting = Meeting(options.store, rank, tuple(names), options.timeout.total_seconds())
    return ShoalGroup(options.store, rank, size, place=find_place(meeting))
