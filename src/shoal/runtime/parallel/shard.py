"""Shard parameters, gradients and optimizer state with FSDP2 (ZeRO-3), for ``shard(n)``.

Each rank computes on its own samples. FSDP2 gathers the parameters of a block before they are used,
and reduce-scatters the gradients, so each rank gets its part of the mean gradient.

References:
    Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020.
    Zhao et al., `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, 2023.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def apply(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each block of ``model``, then its other parameters, in place."""
    for block in list(blocks(model)):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that FSDP2 gathers one by one: the members of the outermost containers.

    A member that shares a parameter with another module is not yielded. It is gathered with the
    root, because two gathers would make two versions of that parameter.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for block in _members(model):
        own = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
        if own and all(uses[key] == count for key, count in own.items()):
            yield block


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            yield child
        else:
            yield from _members(child)
