"""A rank that dies or stops is named by the others in time, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter

from shoal.errors import FaultError
from shoal.testing.processes import outcomes, run_workers

pytestmark = pytest.mark.gloo
N, SECONDS, VICTIM = 100_000, 3.0, 1


def _parts(size: int) -> list[torch.Tensor]:
    return [torch.zeros(N) for _ in range(size)]


def _gather(r: int, n: int) -> None:
    dist.gather(torch.ones(N), _parts(n) if r == 0 else None, dst=0)


def _scatter(r: int, n: int) -> None:
    dist.scatter(torch.ones(N), _parts(n) if r == 0 else None, src=0)


def _message(r: int, n: int) -> None:
    x = torch.ones(N)
    if r == 0:
        dist.send(x, VICTIM)
        dist.recv(x, VICTIM)
    elif r == VICTIM:
        dist.recv(x, 0)
        dist.send(x, 0)
    else:
        dist.recv(x, VICTIM, tag=9)


CALLS: dict[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda r, n: dist.all_reduce(torch.ones(N)),
    "all_reduce later": lambda r, n: dist.all_reduce(torch.ones(N), async_op=True).wait(),
    "reduce": lambda r, n: dist.reduce(torch.ones(N), 0),
    "broadcast": lambda r, n: dist.broadcast(torch.ones(N), VICTIM),
    "all_gather": lambda r, n: dist.all_gather(_parts(n), torch.ones(N)),
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": lambda r, n: dist.reduce_scatter(torch.ones(N), _parts(n)),
    "all_to_all": lambda r, n: dist.all_to_all(_parts(n), _parts(n)),
    "barrier": lambda r, n: dist.barrier(),
    "message": _message,
}


def struck(name: str, number: int) -> tuple[str, float, str]:
    """Repeat a collective while a rank is struck; what the others were told, and when."""
    rank, size = enter(seconds=SECONDS)
    call = CALLS[name]
    if rank == VICTIM:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    dist.barrier()
    begin = time.monotonic()
    try:
        while True:
            call(rank, size)
    except FaultError as error:
        took = time.monotonic() - begin
        if name != "message":
            with pytest.raises(FaultError):
                dist.barrier()  # the group is over, at once
        return str(error), took, type(error).__name__


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_dies_is_named_at_once(name: str) -> None:
    first, victim, third = outcomes(3, struck, name, signal.SIGKILL, seconds=20)
    assert victim.exitcode == -signal.SIGKILL
    for outcome in (first, third):
        assert outcome.error is None, outcome.error
        told, took, kind = outcome.value
        assert kind == "PeerLost"
        assert "rank 1" in told
        assert took < SECONDS  # not by the timeout
        assert name.split()[0] in told or name == "message"
    assert any("is dead" in outcome.value[0] for outcome in (first, third))


@pytest.mark.parametrize("name", ["all_reduce", "message"])
def test_a_rank_that_stops_is_named_within_the_timeout(name: str) -> None:
    first, victim, third = outcomes(3, struck, name, signal.SIGSTOP, seconds=SECONDS + 3)
    assert victim.exitcode == -signal.SIGKILL  # by the test, as it would have slept on
    for outcome in (first, third):
        assert outcome.error is None, outcome.error
        told, took, _ = outcome.value
        assert "rank 1" in told
        assert took < SECONDS + 2
    assert any("is stopped" in outcome.value[0] for outcome in (first, third))


def raising() -> str:
    rank, _ = enter(seconds=20)
    dist.barrier()
    if rank == 1:
        raise ValueError("bad sample")
    begin = time.monotonic()
    with pytest.raises(FaultError) as caught:
        dist.all_reduce(torch.ones(3))
    assert time.monotonic() - begin < 10
    return str(caught.value)


def test_a_rank_that_leaves_with_an_error_is_not_waited_for() -> None:
    first, second = outcomes(2, raising, seconds=30)
    assert second.error is not None
    assert "bad sample" in second.error
    assert "rank 1" in first.value


def late() -> str:
    rank, _ = enter(seconds=1)
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        with pytest.raises(FaultError) as caught:
            dist.broadcast(torch.ones(4), 0)
        return str(caught.value)
    time.sleep(2)
    with pytest.raises(FaultError) as caught:
        dist.broadcast(torch.ones(4), 0)
    return str(caught.value)


def test_a_rank_that_comes_too_late_learns_that_the_others_gave_up() -> None:
    first, second = run_workers(2, late, seconds=20)
    assert "broadcast from 0 of float32 x 4: not done within 1 s" in first
    assert "its last collective was all_reduce (sum) of float32 x 3" in first
    assert "rank 0 gave up" in second
