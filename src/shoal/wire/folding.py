"""Merge messages pairwise up a tree, then tell the root's to all: how a process group answers Fold.

Blocking: whoever wants overlap asks from a communication thread. All asks of one message take the
same hops, so each hop is one send.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.flow import Fold, Folded, tree
from shoal.wire.pending import pack, unpack

Parts = tuple[Tensor, ...]


def fold(asks: Sequence[Fold], group: dist.ProcessGroup | None) -> tuple[Folded, ...]:
    """What the group's messages became, and what I left out when I merged.

    Args:
        asks: mine, of one message; everybody's have the same sizes.
        group: None for all ranks.
    """
    me, workers = dist.get_rank(group), dist.get_world_size(group)
    like = [part for ask in asks for part in ask.parts]
    held = [ask.parts for ask in asks]
    dropped: list[list[Parts]] = [[] for _ in asks]
    for taker, giver in tree(workers):
        if me == giver:
            _send(held, taker, group)
        elif me == taker:
            theirs = _receive(asks, like, giver, group)
            for i, ask in enumerate(asks):
                held[i], out = ask.merge(held[i], theirs[i])
                dropped[i].append(out)
    agreed = _from_root(held, asks, like, group)
    return tuple(
        Folded(parts, tuple(out), workers) for parts, out in zip(agreed, dropped, strict=True)
    )


def _send(held: Sequence[Parts], to: int, group: dist.ProcessGroup | None) -> None:
    message = _packed(held)
    if message.numel():  # both ends know that an empty one is not sent
        dist.send(message, group=group, group_dst=to)


def _receive(
    asks: Sequence[Fold], like: list[Tensor], giver: int, group: dist.ProcessGroup | None
) -> list[Parts]:
    buffer = torch.empty_like(pack(like))
    if buffer.numel():
        dist.recv(buffer, group=group, group_src=giver)
    return _cut(unpack(buffer, like), asks)


def _from_root(
    held: Sequence[Parts], asks: Sequence[Fold], like: list[Tensor], group: dist.ProcessGroup | None
) -> list[Parts]:
    message = _packed(held)
    if message.numel():
        dist.broadcast(message, group=group, group_src=0)
    return _cut(unpack(message, like), asks)


def _packed(held: Sequence[Parts]) -> Tensor:
    return pack([part for parts in held for part in parts])


def _cut(parts: Parts, asks: Sequence[Fold]) -> list[Parts]:
    """The parts of each ask."""
    ends = accumulate((len(ask.parts) for ask in asks), initial=0)
    return [parts[start:stop] for start, stop in pairwise(ends)]
