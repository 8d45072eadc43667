"""The collectives that the suite times, each as a call without arguments, on any process group.

The size of a message is that of the larger side on one rank: the whole tensor of all_reduce and
broadcast, the output of all_gather, the input of reduce_scatter. Bus bandwidth counts the bytes
that must cross a rank's link at least, as nccl-tests does, so it is comparable across rank counts.
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
# torch 2.13 has new names for these, and warns of the old ones
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class TorchCollective:
    """One collective of torch.distributed.

    Attributes:
        name: torch's name of it.
        prepare: takes a group and a number of elements; returns the call.
        traffic: takes the number of ranks; returns bytes over a link per byte of message.
    """

    name: str
    prepare: Callable[[Group, int], Call]
    traffic: Callable[[int], float]


def _all_reduce(group: Group, numel: int) -> Call:
    return partial(dist.all_reduce, torch.zeros(numel), group=group)


def _bucket(group: Group, numel: int) -> Call:
    from shoal.wire.shm import allocate

    return partial(dist.all_reduce, allocate(numel, torch.float32, group), group=group)


def _reduce(group: Group, numel: int) -> Call:
    return partial(dist.reduce, torch.zeros(numel), group_dst=0, group=group)


def _broadcast(group: Group, numel: int) -> Call:
    return partial(dist.broadcast, torch.zeros(numel), group_src=0, group=group)


def _parts(group: Group, numel: int) -> tuple[Tensor, list[Tensor]]:
    """Return one part, and a list with one part for each rank."""
    size = dist.get_world_size(group)
    return torch.zeros(numel // size), [torch.zeros(numel // size) for _ in range(size)]


def _flat(group: Group, numel: int) -> tuple[Tensor, Tensor]:
    """Return one part, and one tensor with the parts of all ranks."""
    size = dist.get_world_size(group)
    return torch.zeros(numel // size), torch.zeros(numel // size * size)


def _all_gather(group: Group, numel: int) -> Call:
    part, parts = _parts(group, numel)
    return partial(dist.all_gather, parts, part, group=group)


def _all_gather_flat(group: Group, numel: int) -> Call:
    part, whole = _flat(group, numel)
    return partial(_ALL_GATHER, whole, part, group=group)


def _reduce_scatter(group: Group, numel: int) -> Call:
    part, parts = _parts(group, numel)
    return partial(dist.reduce_scatter, part, parts, group=group)


def _reduce_scatter_flat(group: Group, numel: int) -> Call:
    part, whole = _flat(group, numel)
    return partial(_REDUCE_SCATTER, part, whole, group=group)


def _all_to_all(group: Group, numel: int) -> Call:
    _, whole = _flat(group, numel)
    return partial(dist.all_to_all_single, torch.zeros_like(whole), whole, group=group)


def _gather(group: Group, numel: int) -> Call:
    part, parts = _parts(group, numel)
    at_root = parts if dist.get_rank(group) == 0 else None
    return partial(dist.gather, part, at_root, group_dst=0, group=group)


def _scatter(group: Group, numel: int) -> Call:
    part, parts = _parts(group, numel)
    at_root = parts if dist.get_rank(group) == 0 else None
    return partial(dist.scatter, part, at_root, group_src=0, group=group)


def _send_recv(group: Group, numel: int) -> Call:
    """Return a call that sends from rank 0 to 1 and back; other ranks do nothing."""
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


IN_PLACE = TorchCollective("all_reduce of a shared bucket", _bucket, _both_ways)
ALL_REDUCE = TorchCollective("all_reduce", _all_reduce, _both_ways)
COLLECTIVES = (
    ALL_REDUCE,
    IN_PLACE,
    TorchCollective("broadcast", _broadcast, _full),
    TorchCollective("reduce", _reduce, _full),
    TorchCollective("all_gather", _all_gather, _one_way),
    TorchCollective("all_gather_single", _all_gather_flat, _one_way),
    TorchCollective("reduce_scatter", _reduce_scatter, _one_way),
    TorchCollective("reduce_scatter_single", _reduce_scatter_flat, _one_way),
    TorchCollective("all_to_all_single", _all_to_all, _one_way),
    TorchCollective("gather", _gather, _one_way),
    TorchCollective("scatter", _scatter, _one_way),
    TorchCollective("send and recv", _send_recv, _full),
)
