"""What the suite ``collectives`` times: each collective as a call without arguments, on any group.

The size of a message is what one rank holds of the larger side: the whole tensor of all_reduce and
broadcast, the gathered list of all_gather, the list before reduce_scatter. Bus bandwidth then
counts the bytes that must pass a rank's link at least, as nccl-tests does: it compares over ranks.
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
class Collective:
    """One collective.

    Attributes:
        name: what torch calls it.
        prepare: from a group and a size in numbers, the call.
        traffic: bytes over a link per byte of message, for a number of ranks.
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
    """One part, and a list with one for each rank."""
    size = dist.get_world_size(group)
    return torch.zeros(numel // size), [torch.zeros(numel // size) for _ in range(size)]


def _flat(group: Group, numel: int) -> tuple[Tensor, Tensor]:
    """One part, and the parts of all in one tensor."""
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
    mine = parts if dist.get_rank(group) == 0 else None
    return partial(dist.gather, part, mine, group_dst=0, group=group)


def _scatter(group: Group, numel: int) -> Call:
    part, parts = _parts(group, numel)
    mine = parts if dist.get_rank(group) == 0 else None
    return partial(dist.scatter, part, mine, group_src=0, group=group)


def _message(group: Group, numel: int) -> Call:
    """There and back between two ranks; the others look on."""
    x, rank = torch.zeros(numel // 2), dist.get_rank(group)

    def call() -> None:
        if rank == 0:
            dist.send(x, group=group, group_dst=1)
            dist.recv(x, group=group, group_src=1)
        elif rank == 1:
            dist.recv(x, group=group, group_src=0)
            dist.send(x, group=group, group_dst=0)

    return call


def _whole(ranks: int) -> float:
    return 1.0


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _both_ways(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


IN_PLACE = Collective("all_reduce of a shared bucket", _bucket, _both_ways)
ALL_REDUCE = Collective("all_reduce", _all_reduce, _both_ways)
COLLECTIVES = (
    ALL_REDUCE,
    IN_PLACE,
    Collective("broadcast", _broadcast, _whole),
    Collective("reduce", _reduce, _whole),
    Collective("all_gather", _all_gather, _share),
    Collective("all_gather_single", _all_gather_flat, _share),
    Collective("reduce_scatter", _reduce_scatter, _share),
    Collective("reduce_scatter_single", _reduce_scatter_flat, _share),
    Collective("all_to_all_single", _all_to_all, _share),
    Collective("gather", _gather, _share),
    Collective("scatter", _scatter, _share),
    Collective("send and recv", _message, _whole),
)
