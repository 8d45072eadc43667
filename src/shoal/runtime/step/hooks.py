"""Keep what a linear layer's gradient is made of: its inputs, and the gradients of its outputs.

Gradients that hold only the rows looked up, and travel as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal import rules
from shoal.axes.compression import Trait
from shoal.flow import Rows
from shoal.runtime.step.exchange import Exchange
from shoal.strategy import Strategy
from shoal.wire.wire import Wire

Pair = tuple[Tensor, Tensor]


class Factors(Mapping[str, Pair]):
    """u (K, rows) and v (K, cols) of each linear weight since the last update; grad = u.T @ v.

    Only layers that ran forward and backward are here, and of those not one whose output is a view
    (of a batch in more dimensions than two) that was then overwritten in place. Both
    tensors are autograd's own, kept a little longer, so nothing is copied until somebody asks.

    Args:
        model: whose ``nn.Linear`` are watched.
        parameters: by the names that are asked for.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        names = {id(p): name for name, p in parameters.items()}
        self._kept: dict[str, list[Pair]] = {}
        self._handles = [
            module.register_forward_hook(self._hook(names[id(module.weight)]))
            for module in model.modules()
            if isinstance(module, nn.Linear) and id(module.weight) in names
        ]

    def __getitem__(self, name: str) -> Pair:
        pairs = self._kept[name]
        us, vs = zip(*pairs, strict=True)
        return (us[0], vs[0]) if len(pairs) == 1 else (torch.cat(us), torch.cat(vs))

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def ran(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            if not given or not out.requires_grad:  # evaluated, or called in a way of its own
                return
            v = given[0].detach()

            def graded(grad: Tensor) -> None:
                rows = (_rows(grad.detach()), _rows(v))
                self._kept.setdefault(name, []).append(rows)

            out.register_hook(graded)

        return ran

    def clear(self) -> None:
        """The gradients are used: what they were made of may go."""
        self._kept.clear()

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self.clear()


def watch(model: nn.Module, parameters: Mapping[str, Tensor], agreement: Exchange) -> Factors:
    """Hand factors to an agreement on gradients, if its compressor has a use for them."""
    wanted = Trait.FACTORS in agreement.compressor.traits
    agreement.factors = Factors(model, parameters if wanted else {})
    return agreement.factors


def _rows(tensor: Tensor) -> Tensor:
    """A batch of samples; one without a batch is a batch of one."""
    return tensor.reshape(-1, tensor.shape[-1])


def looked_up(model: nn.Module, strategy: Strategy) -> set[int]:
    """The parameters, by identity, of which a step's gradient is some rows."""
    if not rules.can_overlap(strategy) or strategy.coordination.via != "collective":
        return set()
    tables = (nn.Embedding, nn.EmbeddingBag)
    found = [m for m in model.modules() if isinstance(m, tables) and m.sparse]
    return {id(m.weight) for m in found}


def agree_rows(parameters: Iterable[Tensor], wire: Wire) -> None:
    """Put the mean of all workers' rows in the place of mine."""
    for p in parameters:
        grad = p.grad if p.grad is not None else _no_rows(p)
        rows = wire.ask(Rows(grad)).wait()
        p.grad = rows if rows._nnz() else None  # looked up by nobody: not a gradient of zero


def _no_rows(p: Tensor) -> Tensor:
    where = torch.zeros(1, 0, dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(where, p.new_zeros(0, *p.shape[1:]), p.shape)
