"""Agree on one message size for all workers, with one small ask before the large one.

Gathered messages have the same size on every worker. Where the size depends on the numbers, each
worker sets a mark on a scale. The sum of all scales shows the largest mark, on any wire and with
any weights.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from shoal.flow import Ask, Mean

MARKS = 256  # on the scale: the result is at most 1/256 of ``most`` above the largest size


def agree(size: int | None, most: int, like: Tensor) -> Generator[Ask, Any, int | None]:
    """Return the lowest mark that no worker's size exceeds; None if a size is above ``most``.

    Args:
        size: of this worker's message; None counts as above ``most``.
        most: the largest useful size, equal on every worker.
        like: a tensor on the device to use.
    """
    step = max(1, -(-most // MARKS))
    last = most // step
    marks = torch.zeros(last + 2, dtype=torch.float32, device=like.device)
    marks[last + 1 if size is None else min(-(-size // step), last + 1)] = 1
    total: Tensor = yield Mean(marks)
    highest = int(total.nonzero().max())
    return None if highest > last else highest * step
