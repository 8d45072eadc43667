"""Where the ranks of a host meet, without a lock and without an atomic operation.

A rank arrives at a meeting by counting its own word up, and waits until no other word is behind.
Ranks are never more than one meeting apart, so what a rank wrote before one meeting may be read
after it, until the next but one: titles are double, and used in turns.

After the first meeting of a collective everyone has read the title of everyone, so a rank that
called something else is found before a byte of data moves.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable

from shoal.errors import ExchangeTimeout, FaultError, LayoutMismatch, PeerLost
from shoal.wire.shm import futex
from shoal.wire.shm.lines import (
    ARRIVED,
    FAILED,
    LEFT,
    LINE_NBYTES,
    PRESENT,
    SLICE,
    STATUS_WORDS,
    TITLE_NBYTES,
    Lines,
)

_SPINS = 2000  # about 130 microseconds, which is what it costs to sleep and be woken
_LATE = "not done within"


def entitled(text: str) -> bytes:
    """A title as :meth:`Board.begin` wants it."""
    return text.encode()[:TITLE_NBYTES].ljust(TITLE_NBYTES)


class Board:
    """Meetings of one group, as one rank goes to them.

    Args:
        lines: of the group.
        seconds: how long to wait for others.
    """

    def __init__(self, lines: Lines, seconds: float) -> None:
        self.lines, self.seconds = lines, seconds
        self._count, self._turn, self._title = 0, 0, b""
        mine = LINE_NBYTES * lines.rank + ARRIVED
        self._word, self._address = mine >> 2, lines.address + mine
        starts = [(r, LINE_NBYTES * r + ARRIVED) for r in range(lines.size) if r != lines.rank]
        self._others = [(start >> 2, lines.address + start, r) for r, start in starts]
        # With fewer cores than ranks, who spins keeps the one it waits for from running.
        self.eager_spins = _SPINS if lines.size <= len(os.sched_getaffinity(0)) else 0
        self.spins = self.eager_spins

    def begin(self, title: bytes) -> None:
        """Come to the first meeting of a collective, and make sure all came to the same one.

        Args:
            title: what this rank is about to do, from :func:`entitled`; equal on every rank.

        Raises:
            LayoutMismatch: somebody is about to do something else; both are shown.
        """
        self._turn = turn = self._turn ^ 1
        self._title = title
        self.lines.entitle(turn, title)
        self.meet()
        if self.lines.differs(turn, title):
            raise LayoutMismatch(self._difference(turn))

    def meet(self) -> None:
        """Wait until every rank has come here.

        Raises:
            PeerLost: a rank has died, left the group or given up.
            ExchangeTimeout: a rank has not come in time.
        """
        words, behind = self.lines.words, self._count
        self._count = now = (behind + 1) & 0x3FFFFFFF
        words[self._word] = now
        futex.wake(self._address)
        for word, address, _ in self._others:
            if words[word] == behind:
                self._await(word, address, behind)
            if words[word + STATUS_WORDS] == FAILED:  # it came, but others did not, so it gave up
                self.check(self._title.decode().strip(), (), math.inf)

    def _await(self, word: int, address: int, behind: int) -> None:
        words = self.lines.words
        for _ in range(self.spins):
            if words[word] != behind:
                return
        end = time.monotonic() + self.seconds
        while words[word] == behind:
            futex.sleep(address, behind, SLICE)
            if words[word] != behind:
                return
            late = [rank for w, _, rank in self._others if words[w] == behind]
            try:
                self.check(self._title.decode().strip(), late, end)
            except FaultError:
                if words[word] == behind:  # else it came at the last moment
                    raise

    def check(self, what: str, awaited: Iterable[int], end: float) -> None:
        """Raise if waiting has become useless.

        Args:
            what: is being waited for.
            awaited: the ranks that should come.
            end: of patience, on the monotonic clock.
        """
        lines, late = self.lines, tuple(awaited)
        for rank in range(lines.size):
            if rank != lines.rank and lines.status(rank) == FAILED:
                reason = lines.reason(rank)
                # if it waited in vain, its patience ended a moment before mine
                kind = ExchangeTimeout if _LATE in reason else PeerLost
                raise kind(f"{what}: rank {lines.names[rank]} gave up: {reason}")
        for rank in late:
            if not lines.peers[rank].alive:
                raise PeerLost(f"{what}: {self._portrait(rank)}, while others needed it")
            if lines.status(rank) == LEFT:
                raise PeerLost(f"{what}: rank {lines.names[rank]} has destroyed the group")
        if time.monotonic() > end:
            told = "; ".join(self._portrait(rank) for rank in late)
            raise ExchangeTimeout(f"{what}: {_LATE} {self.seconds:g} s, for {told}")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has given up, and why."""
        if self.lines.status(self.lines.rank) == PRESENT:
            self.lines.declare(FAILED, str(error))

    def leave(self) -> None:
        """Tell the others that this rank takes no further part."""
        if self.lines.status(self.lines.rank) == PRESENT:
            self.lines.declare(LEFT)

    def _portrait(self, rank: int) -> str:
        lines = self.lines
        peer = lines.peers[rank]
        now, before = (lines.titles(rank)[turn] for turn in (self._turn, self._turn ^ 1))
        place = now if now == self._title.decode().strip() else before
        where = f"its last collective was {place or 'none'}"
        return f"rank {lines.names[rank]} (process {peer.pid}) is {peer.condition}; {where}"

    def _difference(self, turn: int) -> str:
        told: dict[str, list[str]] = {}
        for rank, name in enumerate(self.lines.names):
            told.setdefault(self.lines.titles(rank)[turn], []).append(str(name))
        sides = "; ".join(f"{title} on rank {', '.join(names)}" for title, names in told.items())
        return f"ranks came to different collectives: {sides}; all must call the same"
