"""What workers tell the suite: lines of JSON on rank 0's output; and numbers they agree on."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

DOING, RATE = "doing", "rate"
"""Keys of lines that are no finding: what is being done; the rate that the links are to have."""


def tell(found: Mapping[str, Any]) -> None:
    """One line, from rank 0."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def most(value: float) -> float:
    """The largest of all workers' values."""
    return _agreed(value, dist.ReduceOp.MAX)


def mean(value: float) -> float:
    """The mean of all workers' values."""
    return _agreed(value, dist.ReduceOp.SUM) / dist.get_world_size()


def _agreed(value: float, how: Any) -> float:
    told = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(told, op=how)
    return float(told)
