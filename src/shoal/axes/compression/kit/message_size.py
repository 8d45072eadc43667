"""How large must messages be that all workers send alike? One small question before the large one.

Messages that are gathered have the same size on every worker. Where the size depends on the
numbers, everyone marks its own on a scale; the sum of marks shows the largest, whoever carries it
and with whatever weights.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from shoal.flow import Ask, Mean

MARKS = 256  # of a scale: a bound is at most 1/256 of the whole above the largest size


def largest(size: int | None, most: int, like: Tensor) -> Generator[Ask, Any, int | None]:
    """The least mark that no worker's size exceeds; None where somebody's is over ``most``.

    Args:
        size: mine; None is over ``most``, too.
        most: the largest of use, the same on every worker.
        like: on its device.
    """
    step = max(1, -(-most // MARKS))
    last = most // step
    marks = torch.zeros(last + 2, dtype=torch.float32, device=like.device)
    marks[last + 1 if size is None else min(-(-size // step), last + 1)] = 1
    told: Tensor = yield Mean(marks)
    found = int(told.nonzero().max())
    return None if found > last else found * step
