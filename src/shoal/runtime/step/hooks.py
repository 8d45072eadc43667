"""Keep what a linear layer's gradient is made of: its inputs, and the gradients of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.axes.compression import Trait
from shoal.runtime.agreement import Agreement

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


def watch(model: nn.Module, parameters: Mapping[str, Tensor], agreement: Agreement) -> Factors:
    """Hand factors to an agreement on gradients, if its compressor has a use for them."""
    wanted = Trait.FACTORS in agreement.compressor.traits
    agreement.factors = Factors(model, parameters if wanted else {})
    return agreement.factors


def _rows(tensor: Tensor) -> Tensor:
    """A batch of samples; one without a batch is a batch of one."""
    return tensor.reshape(-1, tensor.shape[-1])
