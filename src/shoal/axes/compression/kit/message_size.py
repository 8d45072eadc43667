"""Agree on one message size for all workers, by a small ask before the message.

The messages of a ``Gather`` must have the same size on every worker. If their size depends on the
numbers, each worker sends a vector with a single 1, at the index of its size on a scale. The last
nonzero entry of the mean of these vectors is the largest size, on any wire and with any weights.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from shoal.flow import Ask, Mean

MARKS = 256  # steps of the scale: a size is rounded up by at most about 1/256 of ``limit``


def agree(size: int | None, limit: int, like: Tensor) -> Generator[Ask, Any, int | None]:
    """Return one size that no worker's ``size`` exceeds, or None if it would be over ``limit``.

    Args:
        size: the size of this worker's message. None means that it is larger than ``limit``.
        limit: the largest useful size, equal on all workers.
        like: a tensor on the device that the ask uses.
    """
    step = max(1, -(-limit // MARKS))
    last_mark = limit // step
    marks = torch.zeros(last_mark + 2, dtype=torch.float32, device=like.device)
    marks[last_mark + 1 if size is None else min(-(-size // step), last_mark + 1)] = 1
    total: Tensor = yield Mean(marks)
    highest_mark = int(total.nonzero().max())
    return None if highest_mark > last_mark else highest_mark * step
