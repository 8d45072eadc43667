"""Bring replicas together: for a while, to evaluate and save; for good, when parameters join."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.runtime.remote.client import pull
from shoal.runtime.remote.pairs import PairWire
from shoal.runtime.step.buffers import real

if TYPE_CHECKING:
    from shoal.runtime.step.replica import Replica


@contextmanager
@torch.no_grad()
def agreed(replica: Replica) -> Iterator[nn.Module]:
    """Inside, the model is what all agree on: parameters where replicas differ, buffers too.

    BatchNorm's running statistics are each worker's own while it trains; here they are the mean.
    """
    replica.drain()
    tensors = [b for b in replica.model.buffers() if b.is_floating_point()]
    if not replica.agrees:
        tensors += list(replica.source.trainable().values())
    if replica.context.replica_index.workers == 1:
        tensors = []
    _rest(replica)
    with still(replica):
        before = [t.detach().clone() for t in tensors]
        taken = _pull(replica)
        for tensor in tensors:
            if tensor.data_ptr() not in taken:  # all took the same: a mean would round
                average(tensor, replica)
        try:
            yield replica.model
        finally:
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)


@torch.no_grad()
def equalise(replica: Replica) -> None:
    """All replicas take the agreed model; parameters that join are rank 0's, as at the start."""
    if replica.context.replica_index.workers == 1:
        return
    if not replica.mode.agrees:
        for tensor in replica.parameters.values():
            average(tensor, replica)
    known, group = {**replica.parameters, **replica.sparse}, replica.context.group
    for name, tensor in replica.source.trainable().items():
        if name not in known:
            first = real(tensor.detach()).contiguous()
            dist.broadcast(first, group=group, group_src=0)
            real(tensor.detach()).copy_(first)


def average(tensor: Tensor, replica: Replica) -> None:
    """Put the mean of all workers' tensors in its place."""
    total = real(tensor.detach()).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=replica.context.group)
    real(tensor.detach()).copy_(total / replica.context.replica_index.workers)


def still(replica: Replica) -> AbstractContextManager[object]:
    """Where peers may move my parameters, they wait meanwhile."""
    return replica.carrier.lock if isinstance(replica.carrier, PairWire) else nullcontext()


def memory_of(names: Mapping[str, Tensor], state: Any) -> Any:
    """A mode's memory of these parameters; anchors start anew, for replicas are equal now."""
    if not isinstance(state, Mapping):
        return state
    kept = {k: memory_of(names, v) for k, v in state.items() if k not in ("anchor", "states")}
    if "states" in state:
        known = {k: v for k, v in state["states"].items() if k.partition("[")[0] in names}
        kept["states"] = known
    return kept


def _rest(replica: Replica) -> None:
    """Where nobody waits for others, they do now: nobody pushes or meets any more."""
    if replica.context.replica_index.workers > 1 and not replica.context.strategy.synchrony.waits:
        dist.barrier()


def _pull(replica: Replica) -> set[int]:
    """Where a server holds the model that counts, everybody takes it; the memory that it filled."""
    if replica.served is None:
        return set()
    return {t.data_ptr() for t in pull(replica.served, replica.source).values()}
