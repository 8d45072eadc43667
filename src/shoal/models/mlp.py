"""A multi-layer perceptron with tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from shoal.errors import BadArgument


class MLP(nn.Sequential):
    """Flattens the input and applies linear layers with ReLU between; ``pipe(n)`` can split it."""

    def __init__(self, widths: Sequence[int]) -> None:
        if len(widths) < 2 or min(widths) < 1:
            raise BadArgument(f"MLP({list(widths)})", "widths must be two or more, all at least 1")
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])  # no ReLU after the last layer

    def tensor_plan(self, n: int) -> dict[str, str]:
        """Return column and row in turn, but gathered for the last layer if their number is odd."""
        linears = [name for name, m in self.named_children() if isinstance(m, nn.Linear)]
        plan = {name: "row" if i % 2 else "column" for i, name in enumerate(linears)}
        if len(linears) % 2:
            plan[linears[-1]] = "gathered"
        return plan


def mlp(inputs: int, outputs: int, *, width: int = 64, layers: int = 2) -> MLP:
    """Return an :class:`MLP` with ``layers`` linear layers and ``width`` features between them."""
    return MLP([inputs, *[width] * (layers - 1), outputs])
