"""Messages overtake each other at hops, in any order, and every sum is still the sum."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.axes.collectives import Collective, native, ring, tree
from shoal.flow import Mean
from shoal.runtime.context import ReplicaIndex
from shoal.runtime.wires import route_plans
from shoal.testing.contracts import make
from shoal.testing.processes import run_workers
from shoal.wire.queued import (
    GroupLinks,
    Links,
    QueuedRoute,
    QueuedWire,
    Urgency,
    newest,
    oldest,
)

SECONDS = 20.0  # a test that waits longer hangs
ROUTES = ["tree", "ring", "butterfly", "double_tree", "halving_doubling", "linear"]


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


class Gated:
    """The links of one hop alone: the test plays all others, and says when a message is through."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.through = threading.Semaphore(0)
        self._coming: dict[int, queue.Queue[tuple[int, Tensor]]] = {}

    def deliver(self, peer: int, number: int, value: float) -> None:
        message = torch.full((2,), value, dtype=torch.float64).view(torch.uint8)
        self._from(peer).put((number, message))

    def send(self, peer: int, number: int, message: Tensor) -> None:
        self.sent.append((peer, number))
        assert self.through.acquire(timeout=SECONDS)

    def receive(self, peer: int) -> tuple[int, Tensor]:
        return self._from(peer).get(timeout=SECONDS)

    def _from(self, peer: int) -> queue.Queue[tuple[int, Tensor]]:
        return self._coming.setdefault(peer, queue.Queue())


class Memory:
    """Links between threads; a message leaves when the other side takes it, as on a socket."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], queue.Queue[tuple]]) -> None:
        self._rank, self._boxes = rank, boxes

    def send(self, peer: int, number: int, message: Tensor) -> None:
        taken = threading.Event()
        self._boxes[self._rank, peer].put((number, message, taken))
        assert taken.wait(SECONDS)

    def receive(self, peer: int) -> tuple[int, Tensor]:
        number, message, taken = self._boxes[peer, self._rank].get(timeout=SECONDS)
        copy = message.clone().view(torch.uint8)
        taken.set()
        return number, copy


@contextmanager
def queued_route(
    links: Links, route: Collective, index: ReplicaIndex, urgency: Urgency = newest
) -> Iterator[QueuedRoute]:
    queues = QueuedRoute(links, route_plans(route, index, None), urgency)
    try:
        yield queues
    finally:
        queues.close()


def passed_on(urgency: Urgency) -> tuple[list[int], list[list[float]]]:
    """The order in which worker 2 passes on to worker 0 what came from 3, and its sums."""
    links = Gated()
    mine = [torch.full((2,), float(number), dtype=torch.float64) for number in range(4)]
    with queued_route(links, tree(), ReplicaIndex(2, 4), urgency) as hop:
        works = [hop.sum(tensor) for tensor in mine]
        links.deliver(3, 0, 10.0)
        until(lambda: links.sent == [(0, 0)])  # the link is busy with the first
        for number in (1, 2, 3):
            links.deliver(3, number, 10.0)
            until(lambda number=number: len(hop.waiting(0)) == number)
        waiting = hop.waiting(0)
        for _ in range(4):
            links.through.release()
        until(lambda: len(links.sent) == 4)
        up = [number for _, number in links.sent]
        assert tuple(up) == (0, *waiting)
        for number in range(4):
            links.deliver(0, number, 100.0 + number)
            links.through.release()
        for work in works:
            work.wait()
    return up, [tensor.tolist() for tensor in mine]


def test_at_a_hop_what_is_needed_first_overtakes_what_came_first() -> None:
    order, sums = passed_on(newest)
    assert order == [0, 3, 2, 1]
    assert sums == [[100.0 + number] * 2 for number in range(4)]


def test_first_come_first_served_overtakes_nobody() -> None:
    order, sums = passed_on(oldest)
    assert order == [0, 1, 2, 3]
    assert sums == [[100.0 + number] * 2 for number in range(4)]


def test_results_are_passed_on_to_all_children_at_once() -> None:
    """The root of four sends to 2 and 1, and neither waits for the other."""
    links = Gated()
    with queued_route(links, tree(), ReplicaIndex(0, 4)) as root:
        work = root.sum(torch.zeros(2, dtype=torch.float64))
        links.deliver(1, 0, 1.0)
        links.deliver(2, 0, 2.0)
        until(lambda: sorted(links.sent) == [(1, 0), (2, 0)])
        assert not work.is_completed()  # they still leave from its memory
        links.through.release(2)
        work.wait()


def test_a_message_of_a_sum_that_has_not_begun_is_stored() -> None:
    links = Gated()
    with queued_route(links, tree(), ReplicaIndex(0, 2)) as root:
        links.through.release(2)
        first = root.sum(torch.zeros(2, dtype=torch.float64))
        links.deliver(1, 1, 7.0)
        links.deliver(1, 0, 5.0)
        until(first.is_completed)
        second = torch.ones(2, dtype=torch.float64)
        root.sum(second).wait()
        assert second.tolist() == [8.0, 8.0]


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("text", ROUTES)
def test_any_order_at_any_hop_gives_the_sum(text: str, world: int) -> None:
    boxes: dict[tuple[int, int], queue.Queue[tuple]] = {
        (a, b): queue.Queue() for a in range(world) for b in range(world)
    }
    sizes = (1, 7, 3, 64, 2)
    sums: dict[int, list[list[float]]] = {}

    def work(rank: int) -> None:
        urgencies: list[Urgency] = [newest, oldest, lambda number: number % 2]
        with queued_route(
            Memory(rank, boxes), make(text), ReplicaIndex(rank, world), urgencies[rank % 3]
        ) as hop:
            mine = [torch.full((n,), 10.0**rank, dtype=torch.float64) for n in sizes]
            for under_way in [hop.sum(tensor) for tensor in mine]:
                under_way.wait()
            sums[rank] = [tensor.tolist() for tensor in mine]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    total = sum(10.0**rank for rank in range(world))
    assert sums == {rank: [[total] * n for n in sizes] for rank in range(world)}


class Broken(Gated):
    """A peer that is gone."""

    def receive(self, peer: int) -> tuple[int, Tensor]:
        raise ConnectionError("rank 1 closed the connection")


def test_a_lost_peer_fails_what_is_under_way_and_what_comes_after() -> None:
    with queued_route(Broken(), tree(), ReplicaIndex(0, 2)) as root:
        under_way = root.sum(torch.zeros(2))
        with pytest.raises(ConnectionError, match="closed the connection"):
            under_way.wait()
        with pytest.raises(ConnectionError, match="closed the connection"):
            root.sum(torch.zeros(2))


def test_torchs_own_sums_go_by_a_tree_for_they_have_no_hops() -> None:
    for worker in range(4):
        index = ReplicaIndex(worker, 4)
        assert route_plans(native(), index, None)(torch.zeros(1)) == route_plans(
            tree(), index, None
        )(torch.zeros(1))
    assert route_plans(ring(), ReplicaIndex(0, 4), None)(torch.zeros(1)).chunks == 4


def _means_in_a_pair() -> list[list[float]]:
    """Ranks 1 and 2 of three: ranks of the group differ from global ones."""
    dist.init_process_group("gloo")
    pair, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank == 0:
        dist.barrier()  # the others still meet at my store
        return []
    queues = QueuedRoute(GroupLinks(pair, 5), route_plans(tree(), ReplicaIndex(rank - 1, 2), pair))
    wire = QueuedWire(pair, weighted=False, queues=queues)
    assert not wire.blocks
    asked = [torch.full((3, n), float(rank * n), dtype=torch.bfloat16) for n in (0, 1, 2, 4)]
    answers = [wire.ask(Mean(tensor)) for tensor in asked]
    means = [answer.wait() for answer in reversed(answers)]
    wire.leave()
    dist.barrier()
    return [[*mean.shape, *mean.flatten().tolist()] for mean in means]


@pytest.mark.gloo
def test_a_group_answers_means_that_are_under_way_together() -> None:
    nobody, *both = run_workers(3, _means_in_a_pair, seconds=60)
    assert nobody == []
    assert both == [[[3, n, *[1.5 * n] * (3 * n)] for n in (4, 2, 1, 0)]] * 2
