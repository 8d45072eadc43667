"""What workers write for the suite: lines of JSON on rank 0's standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DOING, RATE = "doing", "rate"
"""Keys of lines that are no result: what is being done; the rate that the links should have."""
LIMITED = "limited"
"""File beside the job, which the suite writes once the links have the rate asked for."""
ANSWER_SECONDS, POLL_SECONDS = 60.0, 0.01


def write_line(message: Mapping[str, Any]) -> None:
    """Write one message, on rank 0 only."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def request_rate(rate: str, job: Path) -> None:
    """Ask the suite to limit all links, and return when it has; no worker is then in a step."""
    answer = job.with_name(LIMITED)
    dist.barrier()
    if dist.get_rank() == 0:
        answer.unlink(missing_ok=True)
    dist.barrier()
    write_line({RATE: rate})
    end = time.monotonic() + ANSWER_SECONDS
    while not answer.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"the suite did not change the rate within {ANSWER_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def max_over_ranks(value: float) -> float:
    """Return the largest of all workers' values."""
    return _all_reduce(value, dist.ReduceOp.MAX)


def mean_over_ranks(value: float) -> float:
    """Return the mean of all workers' values."""
    return _all_reduce(value, dist.ReduceOp.SUM) / dist.get_world_size()


def _all_reduce(value: float, op: Any) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return float(tensor)
