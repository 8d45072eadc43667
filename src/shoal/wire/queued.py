"""All-reduce several tensors at the same time, with a send queue for each link.

On a route, each rank receives partial sums, adds its own values and forwards the result. If several
messages are ready for one peer, the most urgent one is sent next, not the one that waits longest::

    rank 3 ---> rank 2 [ send queue to rank 0: sum 7, sum 5, sum 4 ] ---> rank 0
                                                ^ goes next

So ranks may send messages in different orders, and a receiver cannot know which message comes next.
Therefore every message carries the number of its sum. Sums are numbered in the order in which they
begin, which is the same on every rank.

A link sends one message at a time in each direction and does not interrupt it, so the most urgent
message waits for at most one other message. If a message arrives before its sum has begun on this
rank, it is stored. So no order of messages can cause a deadlock.
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
from shoal.wire.route import ChunkedTensor, Group, RankRound, write_chunks
from shoal.wire.shm.work import Work
from shoal.wire.wire import Pending, PendingWork, Ready

Urgency: TypeAlias = Callable[[int], int]
"""A function of the number of a sum. The message with the least value is sent next."""


def newest(number: int) -> int:
    """Send messages of the newest sum first, because forward begins where backward ends."""
    return -number


def oldest(number: int) -> int:
    """Send messages of the oldest sum first."""
    return number


class RoutePlan(NamedTuple):
    """This rank's rounds of a route, and the number of chunks into which it divides a tensor."""

    rounds: tuple[RankRound, ...]
    chunks: int


class Links(Protocol):
    """Sends and receives numbered messages. Messages from one peer arrive in the order sent."""

    def send(self, peer: int, number: int, message: Tensor) -> None:
        """Send a message, and return when its memory may be overwritten."""

    def receive(self, peer: int) -> tuple[int, Tensor]:
        """Block until a message from ``peer`` arrives, and return its number and its bytes."""


class GroupLinks:
    """Links over a process group with a CPU backend. Nothing else in the group may use ``tag``."""

    def __init__(self, group: Group, tag: int) -> None:
        self._group, self._tag = group, tag

    def send(self, peer: int, number: int, message: Tensor) -> None:
        """Send a header (number, size in bytes), then the message."""
        raw = message.detach().cpu().view(torch.uint8)
        send = partial(dist.isend, group=self._group, tag=self._tag, group_dst=peer)
        for work in (send(torch.tensor([number, raw.numel()])), send(raw)):
            if work is not None:
                work.wait()

    def receive(self, peer: int) -> tuple[int, Tensor]:
        """Receive a header, then a message of the size in it, and return its number and bytes."""
        receive = partial(dist.recv, group=self._group, tag=self._tag, group_src=peer)
        header = torch.empty(2, dtype=torch.int64)
        receive(header)
        number, nbytes = header.tolist()
        raw = torch.empty(nbytes, dtype=torch.uint8)
        receive(raw)
        return number, raw


class RunningSum:
    """The state of one all-reduce under way, such as its current round and received messages."""

    def __init__(self, number: int, tensor: Tensor, plan: RoutePlan) -> None:
        self.number, self.rounds = number, plan.rounds
        self.chunked = ChunkedTensor(tensor, plan.chunks)
        self.work = Work((tensor,))
        self.unsent = 0
        self.received: dict[int, deque[Tensor]] = {}
        self._round, self._round_sent = 0, False

    def expected(self) -> Counter[int]:
        """Return how many messages of this sum each peer will send to this rank."""
        pairs = (item for own_round in self.rounds for item in own_round.receives.items())
        return Counter(peer for peer, receives in pairs if self._numel(receives))

    def store(self, peer: int, message: Tensor) -> None:
        """Keep a received message until its round is reached."""
        self.received.setdefault(peer, deque()).append(message)

    def advance(self) -> list[tuple[int, Tensor]]:
        """Do as many rounds as possible, and return the (peer, message) pairs to send now.

        All messages of a round can be sent when the round begins. The received messages of a round
        are written into the tensor when all of them have arrived and all messages that this method
        has returned so far are sent, because a message to send may be a view of the tensor.
        """
        ready: list[tuple[int, Tensor]] = []
        while self._round < len(self.rounds):
            own_round = self.rounds[self._round]
            if not self._round_sent:
                self._round_sent = True
                sends = own_round.sends.items()
                messages = [(peer, self.chunked.message(chunks)) for peer, chunks in sends]
                ready += [(peer, message) for peer, message in messages if message.numel()]
            receives = {peer: r for peer, r in own_round.receives.items() if self._numel(r)}
            complete = all(self.received.get(peer) for peer in receives)
            if own_round.receives and (ready or self.unsent or not complete):
                break
            for peer, chunks in receives.items():
                raw = self.received[peer].popleft().view(self.chunked.tensor.dtype)
                write_chunks(self.chunked, raw.to(self.chunked.tensor.device), chunks)
            self._round, self._round_sent = self._round + 1, False
        self.unsent += len(ready)
        return ready

    @property
    def done(self) -> bool:
        """Whether all rounds are done and all messages are sent."""
        return self._round == len(self.rounds) and not self.unsent

    def _numel(self, receives: list[tuple[int, bool]]) -> int:
        """Return the number of elements of a message. Sender and receiver skip an empty message."""
        return sum(self.chunked.part(chunk).numel() for chunk, _ in receives)


class QueuedMessage(NamedTuple):
    """A message in a send queue, which is ordered by urgency, then by ``entry``.

    ``entry`` is the number of messages queued before. It is unique, so tensors are not compared.
    """

    urgency: int
    entry: int
    sum: RunningSum
    message: Tensor


class QueuedRoute:
    """The send queues of one rank. For each peer one thread sends and one thread receives.

    ``plan`` returns this rank's rounds of the route for a tensor. All ranks need the same route.
    """

    def __init__(
        self, links: Links, plan: Callable[[Tensor], RoutePlan], urgency: Urgency = newest
    ) -> None:
        self._links, self._plan, self._urgency = links, plan, urgency
        self._changed = threading.Condition()
        self._begun = self._entries = 0
        self._sums: dict[int, RunningSum] = {}
        # messages of sums that have not begun on this rank: number of the sum -> (peer, message)
        self._early: dict[int, list[tuple[int, Tensor]]] = {}
        self._queues: dict[int, list[QueuedMessage]] = {}
        self._expected: Counter[int] = Counter()
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        self._closed = False
        self._error: BaseException | None = None

    def sum(self, tensor: Tensor) -> Work:
        """Begin to sum a flat tensor in place. All ranks must begin the sums in the same order."""
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
        """Return the sum numbers of the messages queued for a peer, in the order of sending."""
        with self._changed:
            return tuple(queued.sum.number for queued in sorted(self._queues.get(peer, ())))

    def close(self) -> None:
        """End the threads, waiting up to 5 s for each. No sum may be under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.join(5)

    def _advance(self, running: RunningSum) -> None:
        """Queue the messages that can be sent now, and finish the work if the sum is done."""
        for peer, message in running.advance():
            urgency = self._urgency(running.number)
            queue = self._queues.setdefault(peer, [])
            heapq.heappush(queue, QueuedMessage(urgency, self._entries, running, message))
            self._entries += 1
            self._start_thread("send", peer, self._send)
        if running.done and running.number in self._sums:  # _guard removes sums that failed
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
        # called only for sums that have begun here, because _expected counts only their messages
        self._expected[peer] -= 1
        running.store(peer, message)

    def _wait_for(self, ready: Callable[[], bool]) -> bool:
        """Wait until ``ready()`` is true or the queues are closed. Return False if closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or ready())
            return not self._closed

    def _guard(self, loop: Callable[[int], None], peer: int) -> None:
        """Run the loop of a thread. If the loop raises, all sums under way fail with its error."""
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
        """End the threads of the send queues."""
        self.queues.close()

    def _mean(self, tensor: Tensor) -> Pending:
        flat = tensor.detach().contiguous()
        if flat.numel() == 0:
            return Ready(tensor)
        work = self.queues.sum(flat.view(-1))
        return PendingWork((work,), lambda: self._scaled(flat).view(tensor.shape))
