"""Collect the factors of linear layers' gradients, and average sparse gradients of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal import rules
from shoal.flow import Rows
from shoal.strategy import Strategy
from shoal.wire.wire import Wire

FactorPair = tuple[Tensor, Tensor]


class Factors(Mapping[str, FactorPair]):
    """Maps the name of a linear layer's weight to the factors (u, v) of its gradient u.T @ v.

    u holds the gradients of the layer's outputs, with shape (K, rows). v holds the inputs, with
    shape (K, cols). K is the number of input rows since the last update. Only layers that ran
    forward (with a positional input) and backward have an entry. A layer has no entry if the batch
    has more than two dimensions and the output is then overwritten in place. The tensors are
    autograd's own. Reading an entry concatenates them if the layer ran several times.

    Args:
        model: each ``nn.Linear`` in it whose weight is in ``parameters`` gets a forward hook.
        parameters: the parameters by the names that the entries get.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        names = {id(p): name for name, p in parameters.items()}
        self._pairs: dict[str, list[FactorPair]] = {}
        self._handles = [
            module.register_forward_hook(self._hook(names[id(module.weight)]))
            for module in model.modules()
            if isinstance(module, nn.Linear) and id(module.weight) in names
        ]

    def __getitem__(self, name: str) -> FactorPair:
        pairs = self._pairs[name]
        us, vs = zip(*pairs, strict=True)
        return (us[0], vs[0]) if len(pairs) == 1 else (torch.cat(us), torch.cat(vs))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def after_forward(module: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
            if not inputs or not out.requires_grad:  # input passed by keyword, or no backward
                return
            v = inputs[0].detach()

            def on_output_gradient(grad: Tensor) -> None:
                pair = (_as_rows(grad.detach()), _as_rows(v))
                self._pairs.setdefault(name, []).append(pair)

            out.register_hook(on_output_gradient)

        return after_forward

    def clear(self) -> None:
        """Drop the factors, at the end of a step."""
        self._pairs.clear()

    def close(self) -> None:
        """Remove the hooks, and drop the factors."""
        for handle in self._handles:
            handle.remove()
        self.clear()


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a 2-D tensor, with all dimensions but the last flattened into one."""
    return tensor.reshape(-1, tensor.shape[-1])


def sparse_parameters(model: nn.Module, strategy: Strategy) -> set[int]:
    """Return ``id(parameter)`` of each embedding weight whose gradient is exchanged as rows."""
    if not rules.can_overlap(strategy) or strategy.coordination.via != "collective":
        return set()
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {id(m.weight) for m in model.modules() if isinstance(m, tables) and m.sparse}


def average_rows(parameters: Iterable[Tensor], wire: Wire) -> None:
    """Replace each sparse gradient by its mean over workers. All must call this together."""
    for p in parameters:
        rows = wire.ask(Rows(p.grad if p.grad is not None else _no_rows(p))).wait()
        p.grad = rows if rows._nnz() else None  # None if no worker has a gradient


def _no_rows(p: Tensor) -> Tensor:
    indices = torch.zeros(1, 0, dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(indices, p.new_zeros(0, *p.shape[1:]), p.shape)
