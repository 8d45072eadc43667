"""In the middle of each collective a rank is killed or stopped: the others are told.

A shell strikes from outside, so that the rank is hit wherever it is: most likely inside a call, as
it calls one after the other, each of several rounds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter

from shoal.errors import FaultError
from shoal.testing.processes import outcomes
from shoal.wire.shm.memory.peers import Peer

pytestmark = pytest.mark.gloo
N, VICTIM, OTHER_TAG = 1_200_000, 1, 9  # numbers: of 4.8 MB, more than two slots
PATIENCE, SHORT = 60.0, 2.0  # seconds; who dies is noticed long before the first
X, LIST, LIST_2 = torch.ones(N), list(torch.ones(3, N)), list(torch.ones(3, N))


def _gather(r: int) -> None:
    dist.gather(X, LIST if r == 0 else None, dst=0)


def _scatter(r: int) -> None:
    dist.scatter(X, LIST if r == 0 else None, src=0)


def _send(r: int) -> None:
    """To the victim, which takes; the third rank waits for a message of its own."""
    if r == 0:
        dist.send(X, VICTIM)
    else:
        dist.recv(X, 0 if r == VICTIM else VICTIM, tag=0 if r == VICTIM else OTHER_TAG)


def _receive(r: int) -> None:
    """From the victim, which sends to both."""
    if r == VICTIM:
        for work in [dist.isend(X, 0), dist.isend(X, 2)]:
            work.wait()
    else:
        dist.recv(X, VICTIM)


CALLS: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda r: dist.all_reduce(X),
    "all_reduce later": lambda r: dist.all_reduce(X, async_op=True).wait(),
    "reduce": lambda r: dist.reduce(X, 0),
    "broadcast": lambda r: dist.broadcast(X, VICTIM),
    "all_gather": lambda r: dist.all_gather(LIST, X),
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": lambda r: dist.reduce_scatter(X, LIST),
    "all_to_all": lambda r: dist.all_to_all(LIST, LIST_2),
    "barrier": lambda r: dist.barrier(),
    "send": _send,
    "receive": _receive,
}
MESSAGES = ("send", "receive")
QUICK = ("all_reduce", "all_to_all", "receive")
REST = [pytest.param(name, marks=pytest.mark.slow) for name in CALLS if name not in QUICK]


class Told(NamedTuple):
    """What a survivor was told, and who took part."""

    text: str
    kind: str
    peers: tuple[tuple[int, int], ...]


def struck(name: str, number: int, seconds: float, named: bool) -> Told:
    """Repeat a collective until a rank is struck; ``named``: on a segment that is a file."""
    if named:
        del os.memfd_create
    rank, _ = enter(seconds=PATIENCE)
    peers = dist.group.WORLD._barrier.headers.peers
    call = CALLS[name]
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))  # not before: to meet takes its time
    if rank == VICTIM:
        subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -{number} {os.getpid()}"])
    try:
        while True:
            call(rank)
    except FaultError as error:
        if name not in MESSAGES:
            with pytest.raises(FaultError):
                dist.barrier()  # the group is over, at once
        if number == signal.SIGSTOP:
            with suppress(ProcessLookupError):  # the other survivor may have been first
                os.kill(peers[VICTIM].pid, signal.SIGKILL)  # or the test would wait for it
        return Told(str(error), type(error).__name__, tuple(map(tuple, peers)))


def segments() -> set[Path]:
    """Of all programs of this machine that have a name."""
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {path for place in places for path in place.glob("shoal-*") if path.is_file()}


def survivors(name: str, number: int, seconds: float, *, named: bool = False) -> list[Told]:
    """What those are told who are not struck; nobody and nothing is left."""
    before = segments()
    first, victim, third = outcomes(3, struck, name, number, seconds, named, seconds=45)
    assert victim.exitcode == -signal.SIGKILL
    for outcome in (first, third):
        assert outcome.error is None, outcome.error
        assert outcome.exitcode == 0
    assert not any(Peer(*peer).alive for peer in first.value.peers)
    assert not segments() - before
    return [first.value, third.value]


def collective(name: str, told: Told) -> bool:
    """Whether the collective is named; of a message, the side that the survivor was on."""
    sides = ("send (tag", "receive (tag") if name in MESSAGES else (name.split()[0],)
    return told.text.startswith(sides)


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_is_killed_is_named_at_once(name: str) -> None:
    both = survivors(name, signal.SIGKILL, PATIENCE)
    for told in both:
        assert told.kind == "PeerLost", told  # not by the timeout
        assert "rank 1" in told.text
        assert collective(name, told), told
    assert any("is dead" in told.text for told in both)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CALLS],
)
def test_a_rank_that_is_stopped_is_named_at_the_timeout(name: str) -> None:
    both = survivors(name, signal.SIGSTOP, SHORT)
    for told in both:
        assert "rank 1" in told.text
        assert collective(name, told), told
    first = [told for told in both if told.kind == "ExchangeTimeout"]
    assert any("rank 1" in told.text and "is stopped" in told.text for told in first)
    assert all(f"not done within {SHORT:g} s" in told.text for told in first)


def test_a_segment_with_a_name_is_left_behind_by_nobody() -> None:
    both = survivors("all_reduce", signal.SIGKILL, PATIENCE, named=True)
    assert any("is dead" in told.text for told in both)
