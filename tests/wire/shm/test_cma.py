"""Long messages are read where they lie, if every rank can; whatever is wrong is said."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter, needs_reading

from shoal.errors import BadArgument, ExchangeTimeout, FaultError, PeerLost
from shoal.testing.processes import outcomes, run_workers
from shoal.wire.shm.memory import cma as reading
from shoal.wire.shm.memory.cma import Token, can_read, read
from shoal.wire.shm.options import DIRECT_MB, NEVER, direct_nbytes

MB = 1 << 20
LETTER = 300_000  # numbers of a message that is read, however many cores there are


def test_a_token_is_found_by_who_knows_where_it_is() -> None:
    token, other = Token(), Token()
    assert can_read(os.getpid(), token.card)
    assert not can_read(os.getpid(), (token.card[0], other.card[1]))
    assert not can_read(os.getpid(), (0, token.card[1]))


def test_a_process_that_is_gone_cannot_be_read() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(OSError, match="No such process"):
        read(child, 4096, target=4096, nbytes=1)


def test_from_where_on_messages_are_read_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert direct_nbytes() == MB
    monkeypatch.setenv(DIRECT_MB, "2")
    assert direct_nbytes() == 2 * MB
    monkeypatch.setenv(DIRECT_MB, "inf")
    assert direct_nbytes() == NEVER
    for wrong in ("-1", "nan", "much"):
        monkeypatch.setenv(DIRECT_MB, wrong)
        with pytest.raises(BadArgument, match=f"{DIRECT_MB}={wrong}"):
            direct_nbytes()


def least() -> int:
    return int(dist.group.WORLD._collectives._read.least_nbytes)  # type: ignore[union-attr]


def one_cannot(how: str) -> int:
    if int(os.environ["RANK"]) == 1:
        if how == "kernel":
            reading._readv = None
        else:
            os.environ[DIRECT_MB] = how
    rank, size = enter()
    x = torch.full((MB,), float(rank))
    parts = [torch.empty(MB) for _ in range(size)]
    dist.all_gather(parts, x)
    assert [part[-1].item() for part in parts] == list(range(size))
    letter = x[:LETTER].clone()
    dist.send(letter, 1) if rank == 0 else dist.recv(letter, 0)
    assert letter.eq(0).all()
    return least()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "expected"),
    [("kernel", NEVER), ("inf", NEVER), pytest.param("3", 3 * MB, marks=needs_reading)],
)
def test_all_agree_on_what_is_read(how: str, expected: int) -> None:
    assert run_workers(2, one_cannot, how) == [expected, expected]


def in_place() -> None:
    rank, size = enter()
    assert least() == MB
    x = torch.arange(float(size)).repeat_interleave(MB) + 10 * rank
    dist.all_to_all_single(x, x)
    assert x.view(size, MB)[:, 0].tolist() == [10 * r + rank for r in range(size)]
    whole = torch.zeros(size, MB)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole.view(-1), whole[rank])
    assert whole[:, -1].tolist() == list(range(size))
    uneven = [0, 3, MB][:size] if rank == 0 else [rank * MB, 1, 2]
    takes = [[0, 1 * MB, 2 * MB], [3, 1, 1], [MB, 2, 2]][rank]
    got = torch.zeros(sum(takes))
    dist.all_to_all_single(got, torch.full((sum(uneven),), float(rank)), takes, uneven)
    expected = torch.arange(3.0).repeat_interleave(torch.tensor(takes))
    assert got.equal(expected)


@needs_reading
@pytest.mark.gloo
def test_memory_that_is_read_and_written_at_once_gives_what_it_held_before() -> None:
    run_workers(3, in_place)


def aliased() -> list[float]:
    rank, _ = enter()
    x, spare = torch.full((MB,), float(rank)), torch.empty(MB)
    targets = [spare, x] if rank == 0 else [x, spare]  # each other's part goes over one's own
    dist.all_gather(targets, x)
    whole = torch.zeros(2, MB)
    whole[rank] = rank + 5
    dist.all_gather_into_tensor(whole.view(-1), whole[rank])
    return [float(t.mean()) for t in (*targets, *whole)]


@pytest.mark.gloo
def test_a_gathered_part_may_go_where_ones_own_was() -> None:
    assert run_workers(2, aliased) == [[0.0, 1.0, 5.0, 6.0]] * 2


def unreadable() -> str:
    rank, _ = enter(5.0)
    x = torch.ones(LETTER)
    if rank == 1:
        reading._readv = None  # as if the kernel had changed its mind
    dist.barrier()
    with pytest.raises(FaultError) as caught:
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    with pytest.raises(FaultError):
        dist.barrier()
    return str(caught.value)


@needs_reading
@pytest.mark.gloo
def test_a_message_that_cannot_be_read_is_an_error_at_both_ends() -> None:
    sent, received = run_workers(2, unreadable)
    assert "rank 0 cannot be read" in received
    assert "rank 1 gave up" in sent


def in_the_way() -> float:
    rank, _ = enter()
    pieces = [torch.full((MB,), float(r)) for r in range(2)]
    out = pieces[1] if rank == 0 else torch.empty(MB)  # the root's own part goes over the other's
    reading.CmaReader.__call__ = late(reading.CmaReader.__call__)  # type: ignore[method-assign]
    dist.scatter(out, pieces if rank == 0 else None, src=0)
    return float(out.sum()) / MB


def late(read: Callable[..., None]) -> Callable[..., None]:
    def slowly(*args: Any, **options: Any) -> None:
        time.sleep(0.1)
        read(*args, **options)

    return slowly


@pytest.mark.gloo
def test_a_root_may_take_its_part_where_another_was() -> None:
    assert run_workers(2, in_the_way) == [0.0, 1.0]


def withdrawn() -> str:
    rank, _ = enter(1.0)
    x = torch.ones(LETTER)
    dist.barrier()
    if rank == 0:
        with pytest.raises(ExchangeTimeout, match=r"send \(tag 0\): not done within 1 s"):
            dist.send(x, 1)
        x.zero_()  # it is this rank's own again
        time.sleep(2)
        return ""
    time.sleep(2)
    with pytest.raises(FaultError) as caught:
        dist.recv(torch.zeros(LETTER), 0)
    return str(caught.value)


@pytest.mark.gloo
def test_a_message_whose_sender_gave_up_is_not_taken() -> None:
    assert "rank 0 gave up: send" in run_workers(2, withdrawn)[1]


def overtaken() -> str:
    rank, _ = enter(1.0)
    x = torch.ones(LETTER)
    dist.barrier()
    if rank == 0:
        with pytest.raises(ExchangeTimeout):
            dist.send(x, 1, tag=1)
        time.sleep(2)
        return ""
    time.sleep(2)
    with pytest.raises(FaultError) as caught:  # one that is in the way can no longer be read
        dist.recv(torch.zeros(3), 0, tag=2)
    return str(caught.value)


@pytest.mark.gloo
def test_a_message_that_was_given_up_is_not_in_the_way_of_another_for_ever() -> None:
    assert "rank 0 gave up: send" in run_workers(2, overtaken, seconds=30)[1]


def one_of_many_is_gone() -> list[int]:
    rank, _ = enter(20.0)
    if rank == 0:
        dist.isend(torch.ones(LETTER), 1)
        dist.barrier()
        os._exit(0)
    dist.barrier()
    if rank == 2:
        time.sleep(2)
        for tag in (0, 0, 1):
            dist.send(torch.full((LETTER,), 2.0), 1, tag=tag)
        return []
    time.sleep(1)
    x, found = torch.zeros(LETTER), []
    for tag in (1, 0, 0):
        found.append(dist.recv(x.zero_(), tag=tag))
        assert x.eq(2).all()
    return found


@pytest.mark.gloo
def test_who_takes_what_anyone_sends_goes_on_when_one_has_died() -> None:
    _, second, third = outcomes(3, one_of_many_is_gone, seconds=45)
    assert (second.error, third.error) == (None, None)
    assert second.value == [2, 2, 2]


def killed() -> str:
    rank, _ = enter(20.0)
    x = torch.ones(LETTER)
    if rank == 0:
        dist.isend(x, 1)
        dist.barrier()
        time.sleep(0.2)
        os._exit(0)
    dist.barrier()
    time.sleep(1)
    with pytest.raises(PeerLost) as caught:
        dist.recv(x, 0)
    return str(caught.value)


@pytest.mark.gloo
def test_a_message_of_a_rank_that_died_is_an_error() -> None:
    _, second = outcomes(2, killed, seconds=45)
    assert second.error is None, second.error
    assert "receive (tag 0): rank 0" in second.value
    assert "is dead" in second.value
