"""The control words of a group: where ranks meet, and tell each other what they are doing.

Every rank owns one *line* of the board and is the only one to write it, so no atomic operation is
needed: a rank arrives at a meeting by counting its own word up, and waits until no other word is
behind. Ranks are never more than one meeting apart.

A line also carries what the rank is about to do, twice, in turns: after the first meeting of a
collective everyone has read the line of everyone, so a rank that called something else is found
before a byte of data moves. The same turn is used for the slots of data (see ``slots``): what was
written before a meeting may be read after it, until the next but one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NoReturn

from shoal.errors import ExchangeTimeout, FaultError, LayoutMismatch, PeerLost
from shoal.wire.shm import futex
from shoal.wire.shm.peers import Peer
from shoal.wire.shm.segment import Segment

LINE_NBYTES = 1024
_ARRIVED, _STATUS, BELL = 0, 64, 128  # each a word with a cache line of its own
_TITLES, _TITLE_NBYTES = (192, 320), 128
_TEXT, _TEXT_NBYTES = 448, 512
_PRESENT, _LEFT, _FAILED = 0, 1, 2
_SPINS = 300  # about 20 microseconds
_SLICE_SECONDS = 0.05  # how soon a death is noticed
_SLICE = futex.timespec(_SLICE_SECONDS)


class Board:
    """One rank's view of the control words.

    Args:
        segment: shared by the group; its first bytes are the board.
        rank: whose view.
        peers: the process of each rank.
        ranks: what each rank is called in messages: its rank in the whole program.
        seconds: how long to wait for others at a meeting.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        *,
        peers: Sequence[Peer],
        ranks: Sequence[int],
        seconds: float,
    ) -> None:
        self.rank, self.size, self.seconds = rank, len(peers), seconds
        self.ranks, self.peers, self.titled = tuple(ranks), tuple(peers), ""
        self._words, self._bytes = segment.words(), memoryview(segment.memory)
        self._address = segment.address
        self._turn, self._count = 0, 0
        self._others = [
            (LINE_NBYTES * p // 4, segment.address + LINE_NBYTES * p, p)
            for p in range(self.size)
            if p != rank
        ]
        self._mine = LINE_NBYTES * rank
        # With fewer cores than ranks, who spins keeps the one it waits for from running.
        self.spins = _SPINS if self.size <= len(os.sched_getaffinity(0)) else 0

    def begin(self, title: bytes) -> None:
        """Meet at the beginning of a collective, and make sure that all have come to the same one.

        Args:
            title: what this rank is about to do; equal on every rank.

        Raises:
            LayoutMismatch: somebody is about to do something else; both are shown.
        """
        turn = self._turn = self._turn ^ 1
        title = title.ljust(_TITLE_NBYTES)[:_TITLE_NBYTES]
        start = _TITLES[turn]
        mine = self._mine + start
        self._bytes[mine : mine + _TITLE_NBYTES] = title
        self.meet(title)
        for _, _, peer in self._others:
            theirs = LINE_NBYTES * peer + start
            if self._bytes[theirs : theirs + _TITLE_NBYTES] != title:
                raise LayoutMismatch(self._difference(start))

    def meet(self, title: bytes) -> None:
        """Wait until every rank has come here.

        Raises:
            PeerLost: a rank has died, or left the group.
            ExchangeTimeout: a rank has not come in time.
        """
        words, behind = self._words, self._count
        self._count = now = (behind + 1) & 0x3FFFFFFF
        words[self._mine >> 2] = now
        futex.wake(self._address + self._mine)
        for word, address, peer in self._others:
            if words[word] == behind:
                self._await(word, address, peer=peer, behind=behind, title=title)

    def _await(self, word: int, address: int, *, peer: int, behind: int, title: bytes) -> None:
        words = self._words
        for _ in range(self.spins):
            if words[word] != behind:
                return
        end = time.monotonic() + self.seconds
        while words[word] == behind:
            futex.sleep(address, behind, _SLICE)
            if words[word] == behind:
                self.check(title.decode().strip(), peer, end)

    def check(self, what: str, peer: int | None, end: float) -> None:
        """While waiting for a rank: raise if that has become useless.

        Args:
            what: is being waited for.
            peer: whom for; None for whoever comes.
            end: of patience, on the monotonic clock.
        """
        waited = range(self.size) if peer is None else (peer,)
        for other in range(self.size):
            status = self._words[(LINE_NBYTES * other + _STATUS) >> 2]
            if status == _FAILED and other != self.rank:
                raise PeerLost(f"{what}: rank {self.ranks[other]} gave up: {self._text(other)}")
        for other in waited:
            if other == self.rank or not self._behind(other, peer):
                continue
            if self._words[(LINE_NBYTES * other + _STATUS) >> 2] == _LEFT and peer is not None:
                raise PeerLost(f"{what}: rank {self.ranks[other]} has destroyed the group")
            if not self.peers[other].alive and self._behind(other, peer):
                self._lost(what, other)
        if time.monotonic() > end:
            self._late(what, waited)

    def _behind(self, other: int, peer: int | None) -> bool:
        return peer is None or self._words[LINE_NBYTES * other >> 2] != self._count

    def _lost(self, what: str, other: int) -> NoReturn:
        pid = self.peers[other].pid
        raise PeerLost(
            f"{what}: rank {self.ranks[other]} (process {pid}) died while others needed it; "
            f"it was last in {self._last(other)}"
        )

    def _late(self, what: str, waited: Sequence[int]) -> NoReturn:
        missing = [r for r in waited if r != self.rank]
        told = "; ".join(
            f"rank {self.ranks[r]} (process {self.peers[r].pid}, {self.peers[r].condition}) "
            f"was last in {self._last(r)}"
            for r in missing
        )
        raise ExchangeTimeout(f"{what} did not end within {self.seconds:g} s: {told}")

    def _last(self, other: int) -> str:
        titles = [self._title(other, start) for start in _TITLES]
        named = [t for t in titles if t]
        return " / ".join(named) or "no collective"

    def _title(self, other: int, start: int) -> str:
        begin = LINE_NBYTES * other + start
        raw = bytes(self._bytes[begin : begin + _TITLE_NBYTES])
        return raw.decode(errors="replace").strip("\0 ")

    def _difference(self, start: int) -> str:
        told: dict[str, list[int]] = {}
        for other in range(self.size):
            told.setdefault(self._title(other, start), []).append(self.ranks[other])
        sides = "; ".join(
            f"{title} on rank {', '.join(map(str, ranks))}" for title, ranks in told.items()
        )
        return f"ranks called different collectives: {sides}; every rank must call the same"

    def _text(self, other: int) -> str:
        begin = LINE_NBYTES * other + _TEXT
        raw = bytes(self._bytes[begin : begin + _TEXT_NBYTES])
        return raw.decode(errors="replace").strip("\0 ")

    def fail(self, error: FaultError) -> None:
        """Tell the others that this rank has given up, and why."""
        text = str(error).encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES)
        begin = self._mine + _TEXT
        self._bytes[begin : begin + _TEXT_NBYTES] = text
        self._state(_FAILED)

    def leave(self) -> None:
        """Tell the others that this rank takes no further part."""
        if self._words[(self._mine + _STATUS) >> 2] == _PRESENT:
            self._state(_LEFT)

    def _state(self, status: int) -> None:
        self._words[(self._mine + _STATUS) >> 2] = status
        futex.wake(self._address + self._mine)
        for other in range(self.size):
            self.ring(other)

    def bell(self, rank: int) -> int:
        """How often a rank's bell was rung, about."""
        return int(self._words[(LINE_NBYTES * rank + BELL) >> 2])

    def ring(self, rank: int) -> None:
        """Ring a rank's bell: something for it has changed.

        Two who ring at once may count once; what matters is that the word changes and wakes.
        """
        at = LINE_NBYTES * rank + BELL
        self._words[at >> 2] = (self._words[at >> 2] + 1) & 0x3FFFFFFF
        futex.wake(self._address + at)

    def listen(self, heard: int) -> None:
        """Sleep until this rank's bell rings, if it has not since it stood at ``heard``."""
        futex.sleep(self._address + self._mine + BELL, heard, _SLICE)
