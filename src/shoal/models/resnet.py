"""A small residual network with batch normalisation, for images of 8x8 to 32x32.

References:
    He et al., `Deep Residual Learning <https://arxiv.org/abs/1512.03385>`_, 2015, section 4.2.

Other than in section 4.2, a shortcut that changes the shape is a strided 1x1 convolution (option
B of the paper).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F


def convolution(inputs: int, outputs: int, *, size: int = 3, stride: int = 1) -> nn.Sequential:
    """Return a convolution without bias, followed by a batch norm."""
    conv = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Two 3x3 convolutions with a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, stride=stride)
        self.second = convolution(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.short = nn.Identity() if same else convolution(inputs, outputs, size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs, h, w) -> (batch, outputs, h/s, w/s)
        y = self.second(F.relu(self.first(x)))
        return F.relu(cast(Tensor, self.short(x)) + y)


class ResNet(nn.Sequential):
    """A stem, residual blocks, a mean over the image, a linear layer; ``pipe(n)`` can split it."""

    def __init__(self, channels: int, classes: int, widths: Sequence[int]) -> None:
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["stem"] = nn.Sequential(convolution(channels, widths[0]), nn.ReLU())
        inputs = widths[0]
        for i, outputs in enumerate(widths):
            parts[f"block{i}"] = Residual(inputs, outputs, stride=1 if outputs == inputs else 2)
            inputs = outputs
        parts["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        parts["head"] = nn.Linear(inputs, classes)
        super().__init__(parts)


def resnet(
    channels: int = 3, classes: int = 10, *, width: int = 16, depth: int = 1, stages: int = 3
) -> ResNet:
    """Return a :class:`ResNet`; a stage has ``depth`` blocks, twice as wide as the stage before."""
    return ResNet(channels, classes, [width * 2**s for s in range(stages) for _ in range(depth)])
