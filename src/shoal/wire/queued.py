"""All-reduce several tensors at the same time, with a send queue for each link.

On a route, each rank receives partial sums and forwards what is ready. Where several messages are
ready for one peer, the most urgent is sent next, not the one that has waited longest::

    rank 3 ---> rank 2 [ send queue to rank 0: sum 7, sum 5, sum 4 ] ---> rank 0
                                                ^ goes next

So ranks forward messages in different orders, and a receiver cannot know which message comes next:
every message has the number of its sum. Numbers count sums in the order in which they were begun,
which is the same on every rank.

A link carries one message at a time in each direction, and does not interrupt it: an urgent message
waits for at most one other. No rank waits for the order of another, and a message of a sum that has
not begun here is stored, so no order can deadlock.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.wire.collective import CollectiveWire
from shoal.wire.route import Group, Leg, RouteCut, write_chunks
from shoal.wire.shm.work import Work
from shoal.wire.wire import Pending, PendingWork, Ready

Urgency: TypeAlias = Callable[[int], int]
"""Number of a sum -> the position of its messages in a queue; the least is sent first."""


def newest(number: int) -> int:
    """Send the sum that began last first: the layer that backward ends with begins forward."""
    return -number


def oldest(number: int) -> int:
    """First come, first served."""
    return number


class RoutePlan(NamedTuple):
    """This rank's legs of a route, and the number of chunks into which it divides a tensor."""

    legs: tuple[Leg, ...]
    chunks: int


class Links(Protocol):
    """Sends and receives numbered messages; those of one peer arrive in the order sent."""

    def send(self, peer: int, number: int, message: Tensor) -> None:
        """Block until the message may be overwritten."""

    def receive(self, peer: int) -> tuple[int, Tensor]:
        """Block until a message arrives; return its number and its bytes."""


class GroupLinks:
    """Links of a process group that sends from host memory; no other messages have its tag."""

    def __init__(self, group: Group, tag: int) -> None:
        self._group, self._tag = group, tag

    def send(self, peer: int, number: int, message: Tensor) -> None:
        """Send a header (number, bytes), then the message."""
        raw = message.detach().cpu().view(torch.uint8)
        send = partial(dist.isend, group=self._group, tag=self._tag, group_dst=peer)
        for work in (send(torch.tensor([number, raw.numel()])), send(raw)):
            if work is not None:
                work.wait()

    def receive(self, peer: int) -> tuple[int, Tensor]:
        """Receive a header, then as many bytes as it says."""
        receive = partial(dist.recv, group=self._group, tag=self._tag, group_src=peer)
        header = torch.empty(2, dtype=torch.int64)
        receive(header)
        number, nbytes = header.tolist()
        raw = torch.empty(nbytes, dtype=torch.uint8)
        receive(raw)
        return number, raw


class RunningSum:
    """One all-reduce under way: its current leg, messages received, and messages not sent yet."""

    def __init__(self, number: int, tensor: Tensor, plan: RoutePlan) -> None:
        self.number, self.legs = number, plan.legs
        self.cut = RouteCut(tensor, plan.chunks)
        self.work = Work((tensor,))
        self.unsent = 0
        self.received: dict[int, deque[Tensor]] = {}
        self._leg, self._sent_leg = 0, False

    def expected(self) -> Counter[int]:
        """Return the number of messages that each peer will send."""
        pairs = (item for leg in self.legs for item in leg.receives.items())
        return Counter(peer for peer, receives in pairs if self._numel(receives))

    def store(self, peer: int, message: Tensor) -> None:
        """Keep a message until its leg is reached."""
        self.received.setdefault(peer, deque()).append(message)

    def advance(self) -> list[tuple[int, Tensor]]:
        """Go through the legs as far as possible; return (peer, message) of what to send now.

        The messages of a leg depend on nothing that is still to be received, so all are returned
        at once. Received messages are written when all of a leg have arrived and none that they
        would overwrite is still to be sent.
        """
        ready: list[tuple[int, Tensor]] = []
        while self._leg < len(self.legs):
            leg = self.legs[self._leg]
            if not self._sent_leg:
                self._sent_leg = True
                messages = [(peer, self.cut.message(chunks)) for peer, chunks in leg.sends.items()]
                ready += [(peer, message) for peer, message in messages if message.numel()]
            receives = {peer: r for peer, r in leg.receives.items() if self._numel(r)}
            complete = all(self.received.get(peer) for peer in receives)
            if leg.receives and (ready or self.unsent or not complete):
                break
            for peer, chunks in receives.items():
                raw = self.received[peer].popleft().view(self.cut.tensor.dtype)
                write_chunks(self.cut, raw.to(self.cut.tensor.device), chunks)
            self._leg, self._sent_leg = self._leg + 1, False
        self.unsent += len(ready)
        return ready

    @property
    def done(self) -> bool:
        """Whether all messages have been received and sent."""
        return self._leg == len(self.legs) and not self.unsent

    def _numel(self, receives: list[tuple[int, bool]]) -> int:
        """Return the size of a message; both ends know that an empty one is not sent."""
        return sum(self.cut.part(chunk).numel() for chunk, _ in receives)


class QueuedMessage(NamedTuple):
    """A message in a send queue, ordered by urgency, then by the order of entry."""

    urgency: int
    entry: int
    sum: RunningSum
    message: Tensor


class QueuedRoute:
    """The send queues of one rank: for each peer one thread sends and one receives.

    ``plan`` returns the legs that sum a tensor; it returns the same on all ranks.
    """

    def __init__(
        self, links: Links, plan: Callable[[Tensor], RoutePlan], urgency: Urgency = newest
    ) -> None:
        self._links, self._plan, self._urgency = links, plan, urgency
        self._changed = threading.Condition()
        self._begun = self._entries = 0
        self._sums: dict[int, RunningSum] = {}
        self._early: dict[int, list[tuple[int, Tensor]]] = {}  # of sums that have not begun here
        self._queues: dict[int, list[QueuedMessage]] = {}
        self._expected: Counter[int] = Counter()
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        self._closed = False
        self._error: BaseException | None = None

    def sum(self, tensor: Tensor) -> Work:
        """Begin to sum a flat tensor over the group, in place."""
        plan = self._plan(tensor)
        with self._changed:
            if self._error is not None:
                raise self._error
            running = self._sums[self._begun] = RunningSum(self._begun, tensor, plan)
            self._begun += 1
            for peer, count in running.expected().items():
                self._expected[peer] += count
                self._start_thread("receive", peer, self._receive)
            for peer, message in self._early.pop(running.number, ()):
                self._store(running, peer, message)
            self._advance(running)
        return running.work

    def waiting(self, peer: int) -> tuple[int, ...]:
        """Return the numbers of the messages queued for a peer, the next one first."""
        with self._changed:
            return tuple(queued.sum.number for queued in sorted(self._queues.get(peer, ())))

    def close(self) -> None:
        """End the threads, when no sum is under way any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.join(5)

    def _advance(self, running: RunningSum) -> None:
        """Queue the messages that can be sent, or complete the sum."""
        for peer, message in running.advance():
            urgency = self._urgency(running.number)
            queue = self._queues.setdefault(peer, [])
            heapq.heappush(queue, QueuedMessage(urgency, self._entries, running, message))
            self._entries += 1
            self._start_thread("send", peer, self._send)
        if running.done and running.number in self._sums:  # it is not there if it failed meanwhile
            del self._sums[running.number]
            running.work.finish()
        self._changed.notify_all()

    def _start_thread(self, direction: str, peer: int, loop: Callable[[int], None]) -> None:
        if (direction, peer) not in self._threads:
            name = f"shoal-link-{direction}-{peer}"
            thread = threading.Thread(target=self._guard, args=(loop, peer), name=name, daemon=True)
            self._threads[direction, peer] = thread
            thread.start()

    def _send(self, peer: int) -> None:
        queue = self._queues[peer]
        while self._wait_for(lambda: bool(queue)):
            with self._changed:
                _, _, running, message = heapq.heappop(queue)
            self._links.send(peer, running.number, message)
            with self._changed:
                running.unsent -= 1
                self._advance(running)

    def _receive(self, peer: int) -> None:
        while self._wait_for(lambda: self._expected[peer] > 0):
            number, message = self._links.receive(peer)
            with self._changed:
                running = self._sums.get(number)
                if running is None:
                    self._early.setdefault(number, []).append((peer, message))
                else:
                    self._store(running, peer, message)
                    self._advance(running)

    def _store(self, running: RunningSum, peer: int, message: Tensor) -> None:
        # called when the message arrives or, if that is earlier than its sum, when the sum begins:
        # _expected counts messages of sums that have begun
        self._expected[peer] -= 1
        running.store(peer, message)

    def _wait_for(self, ready: Callable[[], bool]) -> bool:
        """Wait until ``ready``; return False when the route is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or ready())
            return not self._closed

    def _guard(self, loop: Callable[[int], None], peer: int) -> None:
        """Run a thread's loop; an error on any link fails every sum under way."""
        try:
            loop(peer)
        except BaseException as error:
            with self._changed:
                self._error, self._closed = self._error or error, True
                failed, self._sums = list(self._sums.values()), {}
                self._changed.notify_all()
            for running in failed:
                running.work.finish(error)


class QueuedWire(CollectiveWire):
    """A :class:`CollectiveWire` whose means go through send queues, several at the same time."""

    def __init__(self, group: Group, *, weighted: bool, queues: QueuedRoute) -> None:
        super().__init__(group, weighted=weighted)
        self.queues = queues

    def leave(self) -> None:
        """End the threads of the queues."""
        self.queues.close()

    def _mean(self, tensor: Tensor) -> Pending:
        flat = tensor.detach().contiguous()
        if flat.numel() == 0:
            return Ready(tensor)
        work = self.queues.sum(flat.view(-1))
        return PendingWork((work,), lambda: self._scaled(flat).view(tensor.shape))
