"""The collectives that the suite times, each as a function without arguments.

The size of a message is the larger one of input and output on one rank: the tensor of all_reduce
and broadcast, the output of all_gather, the input of reduce_scatter. Bus bandwidth is computed as
in nccl-tests from the bytes that must at least cross the link of a rank, so that it can be compared
between numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

Call = Callable[[], object]
Group = dist.ProcessGroup
# torch 2.13 has new names for these functions, and warns if the old names are used
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class TorchCollective:
    """One collective of torch.distributed.

    Attributes:
        name: its name in torch, perhaps with a remark.
        prepare: takes a group and a number of elements; returns the function to time.
        traffic: takes the number of ranks; returns the bytes over a link per byte of message.
    """

    name: str
    prepare: Callable[[Group, int], Call]
    traffic: Callable[[int], float]


def _whole(group: Group, numel: int) -> Tensor:
    return torch.zeros(numel)


def _bucket(group: Group, numel: int) -> Tensor:
    from shoal.wire.shm import allocate

    return allocate(numel, torch.float32, group)


def _part(group: Group, numel: int) -> Tensor:
    return torch.zeros(numel // group.size())


def _parts(group: Group, numel: int) -> list[Tensor]:
    return [_part(group, numel) for _ in range(group.size())]


def _flat(group: Group, numel: int) -> Tensor:
    """Return one tensor with room for the parts of all ranks."""
    return torch.zeros(numel // group.size() * group.size())


def _parts_at_root(group: Group, numel: int) -> list[Tensor] | None:
    return _parts(group, numel) if group.rank() == 0 else None


def _call(
    function: Callable[..., object], *buffers: Callable[[Group, int], object], **root: int
) -> Callable[[Group, int], Call]:
    """Return a ``prepare`` function, which makes the buffers and binds ``function`` to them."""

    def prepare(group: Group, numel: int) -> Call:
        return partial(function, *(make(group, numel) for make in buffers), group=group, **root)

    return prepare


def _send_recv(group: Group, numel: int) -> Call:
    """Return a function that sends ``numel // 2`` elements from rank 0 to rank 1 and back.

    On other ranks it does nothing.
    """
    x, rank = torch.zeros(numel // 2), dist.get_rank(group)

    def call() -> None:
        if rank == 0:
            dist.send(x, group=group, group_dst=1)
            dist.recv(x, group=group, group_src=1)
        elif rank == 1:
            dist.recv(x, group=group, group_src=0)
            dist.send(x, group=group, group_dst=0)

    return call


def _full(ranks: int) -> float:
    return 1.0


def _one_way(ranks: int) -> float:
    return (ranks - 1) / ranks


def _both_ways(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


IN_PLACE = TorchCollective(
    "all_reduce of a shared bucket", _call(dist.all_reduce, _bucket), _both_ways
)
ALL_REDUCE = TorchCollective("all_reduce", _call(dist.all_reduce, _whole), _both_ways)
COLLECTIVES = (
    ALL_REDUCE,
    IN_PLACE,
    TorchCollective("broadcast", _call(dist.broadcast, _whole, group_src=0), _full),
    TorchCollective("reduce", _call(dist.reduce, _whole, group_dst=0), _full),
    TorchCollective("all_gather", _call(dist.all_gather, _parts, _part), _one_way),
    TorchCollective("all_gather_single", _call(_ALL_GATHER, _flat, _part), _one_way),
    TorchCollective("reduce_scatter", _call(dist.reduce_scatter, _part, _parts), _one_way),
    TorchCollective("reduce_scatter_single", _call(_REDUCE_SCATTER, _part, _flat), _one_way),
    TorchCollective("all_to_all_single", _call(dist.all_to_all_single, _flat, _flat), _one_way),
    TorchCollective("gather", _call(dist.gather, _part, _parts_at_root, group_dst=0), _one_way),
    TorchCollective("scatter", _call(dist.scatter, _part, _parts_at_root, group_src=0), _one_way),
    TorchCollective("send and recv", _send_recv, _full),
)
