"""A small residual network with batch normalisation, for images of 8x8 to 32x32.

References:
    He et al., `Deep Residual Learning <https://arxiv.org/abs/1512.03385>`_, 2015, section 4.2.

Differs from the paper: a strided 1x1 convolution where a block changes shape (its option B).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F


def convolution(here: int, there: int, *, size: int = 3, stride: int = 1) -> nn.Sequential:
    """A convolution without bias, then the batch norm that has one."""
    conv = nn.Conv2d(here, there, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(there))


class Residual(nn.Module):
    """Two 3x3 convolutions, added to their input."""

    def __init__(self, here: int, there: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(here, there, stride=stride)
        self.second = convolution(there, there)
        same = here == there and stride == 1
        self.short = nn.Identity() if same else convolution(here, there, size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:  # (batch, here, h, w) -> (batch, there, h/s, w/s)
        y = self.second(F.relu(self.first(x)))
        return F.relu(cast(Tensor, self.short(x)) + y)


class ResNet(nn.Sequential):
    """Stem, residual blocks, mean over the image, linear: a chain, so it can be a pipeline."""

    def __init__(self, channels: int, classes: int, widths: Sequence[int]) -> None:
        links: OrderedDict[str, nn.Module] = OrderedDict()
        links["stem"] = nn.Sequential(convolution(channels, widths[0]), nn.ReLU())
        here = widths[0]
        for i, there in enumerate(widths):
            links[f"block{i}"] = Residual(here, there, stride=1 if there == here else 2)
            here = there
        links["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        links["head"] = nn.Linear(here, classes)
        super().__init__(links)


def resnet(
    channels: int = 3, classes: int = 10, *, width: int = 16, depth: int = 1, stages: int = 3
) -> ResNet:
    """A :class:`ResNet`: ``stages`` of ``depth`` blocks, each twice as wide and half as large."""
    return ResNet(channels, classes, [width * 2**s for s in range(stages) for _ in range(depth)])
