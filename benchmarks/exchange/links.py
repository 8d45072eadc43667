"""Workers of a job ask the suite for other rates of their links."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from shoal.bench.exchange.places import LIMITED
from shoal.bench.exchange.telling import RATE, tell

ANSWER_SECONDS, GLANCE_SECONDS = 60.0, 0.01


def ask_for_rate(rate: str, job: Path) -> None:
    """Have all links limited to a rate, between steps of all workers; return when they are."""
    answer = job.with_name(LIMITED)
    dist.barrier()
    if dist.get_rank() == 0:
        answer.unlink(missing_ok=True)
    dist.barrier()
    tell({RATE: rate})
    end = time.monotonic() + ANSWER_SECONDS
    while not answer.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"nobody changed the rate within {ANSWER_SECONDS:.0f} s")
        time.sleep(GLANCE_SECONDS)
    dist.barrier()
