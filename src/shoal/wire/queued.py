"""Sum several tensors over a group at the same time, along routes, with a queue at every hop.

On a route each rank is a hop for the others: it takes in what comes, and passes on what is ready.
Where several messages are ready for one peer, the most urgent of them goes next, not the one that
waited longest. So ranks pass messages on in orders of their own, and a receiver cannot know which
one comes: every message says its number. Numbers are the order in which sums were asked for, which
is the same on every rank.

A link carries one message at a time each way, and what is under way is not interrupted: the size of
a message is what an urgent one may have to wait for. Nobody waits for an order that another rank
keeps, and what comes before it was asked for here is held, so no order can lock up.
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
from shoal.wire.route import Leg, RouteCut, take_in
from shoal.wire.shm.work import Work
from shoal.wire.wire import Pending, PendingWork, Ready

Urgency: TypeAlias = Callable[[int], int]
"""Number of a message -> its place in a queue; the least goes first."""


def newest(number: int) -> int:
    """What was asked for last goes first: where backward ends, the next forward begins."""
    return -number


def oldest(number: int) -> int:
    """First come, first served."""
    return number


class Path(NamedTuple):
    """This rank's part in a route, and into how many chunks a message is cut for it."""

    legs: tuple[Leg, ...]
    chunks: int


class Links(Protocol):
    """What carries numbered messages to and from each peer, in the order sent. Both block."""

    def send(self, peer: int, number: int, message: Tensor) -> None:
        """Return when the message may be overwritten."""

    def receive(self, peer: int) -> tuple[int, Tensor]:
        """The next message's number, and its bytes."""


class GroupLinks:
    """Links of a process group whose messages may lie in the host's memory.

    Args:
        group: None for all ranks.
        tag: of its messages, and of no others of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, tag: int) -> None:
        self._group, self._tag = group, tag

    def send(self, peer: int, number: int, message: Tensor) -> None:
        """A head of two numbers, then the bytes."""
        raw = message.detach().cpu().view(torch.uint8)
        head = torch.tensor([number, raw.numel()])
        send = partial(dist.isend, group=self._group, tag=self._tag, group_dst=peer)
        for work in (send(head), send(raw)):
            if work is not None:
                work.wait()

    def receive(self, peer: int) -> tuple[int, Tensor]:
        """The head tells how many bytes follow."""
        receive = partial(dist.recv, group=self._group, tag=self._tag, group_src=peer)
        head = torch.empty(2, dtype=torch.int64)
        receive(head)
        number, nbytes = head.tolist()
        raw = torch.empty(nbytes, dtype=torch.uint8)
        receive(raw)
        return number, raw


class Sum:
    """One tensor on its way: where it stands in its legs, what has come, what has not left yet."""

    def __init__(self, number: int, tensor: Tensor, path: Path) -> None:
        self.number, self.legs = number, path.legs
        self.cut = RouteCut(tensor, path.chunks)
        self.work = Work((tensor,))
        self.leaving = 0
        self.came: dict[int, deque[Tensor]] = {}
        self._at, self._entered = 0, False

    def awaited(self) -> Counter[int]:
        """Messages that each peer will send."""
        takes = (item for leg in self.legs for item in leg.receives.items())
        return Counter(peer for peer, taken in takes if self._numel(taken))

    def arrived(self, peer: int, message: Tensor) -> None:
        """Keep it until its leg is reached."""
        self.came.setdefault(peer, deque()).append(message)

    def advance(self) -> list[tuple[int, Tensor]]:
        """Go on as far as can be; the messages that may leave now, with whom they are for.

        What follows from nothing that is still to come leaves at once, to all peers. What comes is
        taken in when it is all there, and nothing that it would overwrite still leaves.
        """
        ready: list[tuple[int, Tensor]] = []
        while self._at < len(self.legs):
            leg = self.legs[self._at]
            if not self._entered:
                self._entered = True
                messages = [(peer, self.cut.message(gives)) for peer, gives in leg.sends.items()]
                ready += [(peer, message) for peer, message in messages if message.numel()]
            if leg.receives and (ready or self.leaving or not self._complete(leg)):
                break
            self._take(leg)
            self._at, self._entered = self._at + 1, False
        self.leaving += len(ready)
        return ready

    @property
    def over(self) -> bool:
        """Whether all came, and all left."""
        return self._at == len(self.legs) and not self.leaving

    def _complete(self, leg: Leg) -> bool:
        takes = leg.receives.items()
        return all(self.came.get(peer) or not self._numel(taken) for peer, taken in takes)

    def _take(self, leg: Leg) -> None:
        for peer, takes in leg.receives.items():
            if self._numel(takes):
                raw = self.came[peer].popleft().view(self.cut.tensor.dtype)
                take_in(self.cut, raw.to(self.cut.tensor.device), takes)

    def _numel(self, takes: list[tuple[int, bool]]) -> int:
        """Both ends know that an empty message is not sent."""
        return sum(self.cut.part(chunk).numel() for chunk, _ in takes)


class QueuedMessage(NamedTuple):
    """A message that waits at a hop, ordered by its place in the queue."""

    urgency: int
    turn: int
    sum: Sum
    message: Tensor


class QueuedRoute:
    """The queues of one rank: two threads a peer, one that sends and one that receives.

    Args:
        links: to the peers.
        path: by which legs a tensor is summed; the same for all ranks that ask.
        urgency: which of the waiting messages goes next.
    """

    def __init__(
        self, links: Links, path: Callable[[Tensor], Path], urgency: Urgency = newest
    ) -> None:
        self._links, self._path, self._urgency = links, path, urgency
        self._changed = threading.Condition()
        self._asked = self._turns = 0
        self._sums: dict[int, Sum] = {}
        self._held: dict[int, list[tuple[int, Tensor]]] = {}  # came before it was asked for
        self._queues: dict[int, list[QueuedMessage]] = {}
        self._awaited: Counter[int] = Counter()
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        self._closed = False
        self._error: BaseException | None = None

    def sum(self, tensor: Tensor) -> Work:
        """Begin to sum a flat tensor over the group, in place."""
        path = self._path(tensor)
        with self._changed:
            if self._error is not None:
                raise self._error
            one = self._sums[self._asked] = Sum(self._asked, tensor, path)
            self._asked += 1
            for peer, count in one.awaited().items():
                self._awaited[peer] += count
                self._serve("receive", peer, self._receive)
            for peer, message in self._held.pop(one.number, ()):
                self._take(one, peer, message)
            self._advance(one)
        return one.work

    def waiting(self, peer: int) -> tuple[int, ...]:
        """Numbers of the messages that wait for the link to a peer, the next one first."""
        with self._changed:
            return tuple(letter.sum.number for letter in sorted(self._queues.get(peer, ())))

    def close(self) -> None:
        """End the threads; nothing is under way any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.join(5)

    def _advance(self, one: Sum) -> None:
        """Queue what may leave, or end the sum."""
        for peer, message in one.advance():
            letter = QueuedMessage(self._urgency(one.number), self._turns, one, message)
            self._turns += 1
            heapq.heappush(self._queues.setdefault(peer, []), letter)
            self._serve("send", peer, self._send)
        if one.over and one.number in self._sums:  # else it failed meanwhile
            del self._sums[one.number]
            one.work.finish()
        self._changed.notify_all()

    def _serve(self, way: str, peer: int, loop: Callable[[int], None]) -> None:
        if (way, peer) not in self._threads:
            name = f"shoal-hop-{way}-{peer}"
            thread = threading.Thread(target=self._guard, args=(loop, peer), name=name, daemon=True)
            self._threads[way, peer] = thread
            thread.start()

    def _send(self, peer: int) -> None:
        queue = self._queues[peer]
        while self._have(lambda: bool(queue)):
            with self._changed:
                _, _, one, message = heapq.heappop(queue)
            self._links.send(peer, one.number, message)
            with self._changed:
                one.leaving -= 1
                self._advance(one)

    def _receive(self, peer: int) -> None:
        while self._have(lambda: self._awaited[peer] > 0):
            number, message = self._links.receive(peer)
            with self._changed:
                one = self._sums.get(number)
                if one is None:
                    self._held.setdefault(number, []).append((peer, message))
                else:
                    self._take(one, peer, message)
                    self._advance(one)

    def _take(self, one: Sum, peer: int, message: Tensor) -> None:
        self._awaited[peer] -= 1  # not of those held: what was asked for is still to come
        one.arrived(peer, message)

    def _have(self, something: Callable[[], bool]) -> bool:
        """Wait until there is something to do; False when there will be nothing any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or something())
            return not self._closed

    def _guard(self, loop: Callable[[int], None], peer: int) -> None:
        """Whatever fails on a link fails every sum that is under way."""
        try:
            loop(peer)
        except BaseException as error:
            with self._changed:
                self._error, self._closed = self._error or error, True
                broken, self._sums = list(self._sums.values()), {}
                self._changed.notify_all()
            for one in broken:
                one.work.finish(error)


class QueuedWire(CollectiveWire):
    """A process group whose sums go by queues at every hop, several at the same time.

    Args:
        group: the workers taking part.
        weighted: contributions come scaled by weights that sum to one, so that the mean is the sum.
        hops: this rank's queues.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, weighted: bool, hops: QueuedRoute
    ) -> None:
        super().__init__(group, weighted=weighted)
        self.hops = hops

    def leave(self) -> None:
        """End the queues' threads."""
        self.hops.close()

    def _mean(self, tensor: Tensor) -> Pending:
        flat = tensor.detach().contiguous()
        if flat.numel() == 0:
            return Ready(tensor)
        work = self.hops.sum(flat.view(-1))
        return PendingWork((work,), lambda: self._scaled(flat).view(tensor.shape))
