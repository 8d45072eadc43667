"""Layers that compute elsewhere: while a device works, its host sleeps.

Four workers share two cores here. Were their layers to compute as long as their messages take, the
threads that pass messages on would wait for a core, and nothing could overlap, whatever the
schedule. So the models of the duels compute little, and sleep for the rest of their time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD = 1 / 3  # of a step's time


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds * (1 - FORWARD)
        time.sleep(seconds * FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return grads[0], None


def elsewhere(model: nn.Module, seconds: float) -> nn.Module:
    """The model, its linear layers each asleep for their share of ``seconds`` a step.

    Shares go by the number of parameters; forward takes a third of it, and backward the rest,
    before the layer's gradients are there.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    total = sum(layer.weight.numel() for layer in layers)
    for layer in layers:
        share = seconds * layer.weight.numel() / total

        def asleep(_: nn.Module, inputs: Any, output: Tensor, share: float = share) -> Tensor:
            slept: Tensor = _Sleep.apply(output, share)  # type: ignore[no-untyped-call]
            return slept

        layer.register_forward_hook(asleep)
    return model
