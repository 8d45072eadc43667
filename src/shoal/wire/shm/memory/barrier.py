"""Where the ranks of a host meet, without a common lock and without an atomic operation.

A rank arrives at a meeting by counting its own word up, and waits until no other word is behind.
Ranks are never more than one meeting apart. What a rank wrote before one meeting is read after it,
by everyone before he comes to the next; after that one it may be written over. Whatever is written
before every meeting is double, therefore, and used in turns: titles here, slots elsewhere.

After the first meeting of a collective everyone has read the title of everyone, so a rank that
called something else is found before a byte of data moves.

What each rank writes about itself in the shared segment, for the others to read.

Every rank owns one *line* and is the only one to write it (its bell apart), so that no atomic
operation is needed. A line holds the count of meetings the rank has come to, whether it is still
there, what it is doing, and, if it gave up, why.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

from shoal.errors import ExchangeTimeout, FaultError, LayoutMismatch, PeerLost
from shoal.wire.shm.memory import futex
from shoal.wire.shm.memory.peers import Peer
from shoal.wire.shm.memory.segment import Segment

LOOKS = 200  # about 150 microseconds on an idle core, which is what sleep and waking cost
_LATE = "not done within"
give_way = getattr(os, "sched_yield", lambda: None)


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
        self._count, self._turn = 0, 0
        self._titles, self._marks = [b"", b""], [0, 0]  # what this rank says it does, by turn
        mine = LINE_NBYTES * lines.rank + ARRIVED
        self._word, self._address = mine >> 2, lines.address + mine
        starts = [(r, LINE_NBYTES * r + ARRIVED) for r in range(lines.size) if r != lines.rank]
        self._others = [(start >> 2, lines.address + start, r) for r, start in starts]
        self._theirs = [(LINE_NBYTES * r + MARKS) >> 3 for r, _ in starts]
        self._fence = threading.Lock()
        self._looks = LOOKS
        self._broken = ""

    def ready(self, *, background: bool) -> None:
        """Get ready for a collective, which the caller waits for or which runs in the background.

        Raises:
            PeerLost: one has failed before, so ranks may be anywhere.
        """
        self.require_whole()
        # In the background somebody else here may have work for the core, and for Python's lock.
        self._looks = 0 if background else LOOKS

    def require_whole(self) -> None:
        """Raise if something has failed before, so that ranks may be anywhere."""
        if self._broken:
            raise PeerLost(f"the group has failed before: {self._broken}")

    def broke(self, error: BaseException) -> None:
        """Remember what went wrong, and tell; but all see a mismatch alike, and can go on."""
        if not isinstance(error, LayoutMismatch) and not self._broken:
            self._broken = str(error) or type(error).__name__  # the error itself holds the group
            self.fail(error)

    def begin(self, title: bytes) -> None:
        """Come to the first meeting of a collective, and make sure all came to the same one.

        Args:
            title: what this rank is about to do, from :func:`entitled`; equal on every rank.

        Raises:
            LayoutMismatch: somebody is about to do something else; both are shown.
        """
        self._turn = turn = self._turn ^ 1
        if self._titles[turn] != title:
            self._titles[turn], self._marks[turn] = title, self.lines.entitle(turn, title)
        self.meet()
        marks, mine = self.lines.marks, self._marks[turn]
        for at in self._theirs:
            if marks[at + turn] != mine:
                raise LayoutMismatch(_difference(self.lines, turn))

    def meet(self) -> None:
        """Wait until every rank has come here.

        Raises:
            PeerLost: a rank has died, left the group or given up.
            ExchangeTimeout: a rank has not come in time.
        """
        words, behind = self.lines.words, self._count
        self._count = now = (behind + 1) & 0x3FFFFFFF
        words[self._word] = now
        self._fence.acquire()  # my own: what was written is seen before what follows is read,
        self._fence.release()  # so either I see that somebody sleeps, or it sees my word
        for word, _, _ in self._others:
            if words[word + SLEEPS_WORDS]:
                futex.wake(self._address)
                break
        for word, address, _ in self._others:
            if words[word] == behind:
                self._await(word, address, behind)
            if words[word + STATUS_WORDS] == FAILED:  # it came, but others did not, so it gave up
                self.check(self.title, (), math.inf)

    @property
    def title(self) -> str:
        """What this rank does, or did last."""
        return self._titles[self._turn].decode().strip()

    def _await(self, word: int, address: int, behind: int) -> None:
        words = self.lines.words
        for _ in range(self._looks):
            if words[word] != behind:
                return
            give_way()  # with fewer cores than ranks, the one awaited may need this one
        end = time.monotonic() + self.seconds
        words[self._word + SLEEPS_WORDS] = 1
        try:
            self._sleep(word, address, behind, end=end)
        finally:
            words[self._word + SLEEPS_WORDS] = 0

    def _sleep(self, word: int, address: int, behind: int, *, end: float) -> None:
        words = self.lines.words
        while words[word] == behind:
            futex.sleep(address, behind, SLICE)
            if words[word] != behind:
                return
            late = [rank for w, _, rank in self._others if words[w] == behind]
            try:
                self.check(self.title, late, end)
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
        place = now if now == self.title else before
        where = f"its last collective was {place or 'none'}"
        return f"rank {lines.names[rank]} (process {peer.pid}) is {peer.condition}; {where}"


def _difference(lines: Lines, turn: int) -> str:
    told: dict[str, list[str]] = {}
    for rank, name in enumerate(lines.names):
        told.setdefault(lines.titles(rank)[turn], []).append(str(name))
    sides = "; ".join(f"{title} on rank {', '.join(names)}" for title, names in told.items())
    return f"ranks came to different collectives: {sides}; all must call the same"


LINE_NBYTES = 1024
ARRIVED, _STATUS, _BELL = 0, 64, 128  # each a word, in another cache line
STATUS_WORDS = (_STATUS - ARRIVED) >> 2  # from one to the other
SLEEPS_WORDS = 1  # from ARRIVED, in its cache line: whether the rank sleeps until another arrives
MARKS = 16  # in that line too, 64 bits each: of the two titles
TITLE_NBYTES = 128
_TITLES = (192, 320)
_TEXT, _TEXT_NBYTES = 448, 512
PRESENT, LEFT, FAILED = 0, 1, 2
SLICE = futex.timespec(0.05)  # the longest sleep before looking whether all still live


@lru_cache(maxsize=1024)
def _mark(title: bytes) -> int:
    """A number instead of a title: equal if titles are, and else not, but once in 2**64 times."""
    return int.from_bytes(blake2b(title, digest_size=8).digest(), "little", signed=True)


class Lines:
    """The lines of a group as one rank sees them.

    Args:
        segment: shared by the group; its first bytes are the lines.
        rank: whose view, counted in the group.
        peers: the process of each rank.
        names: what each rank is called in messages: its rank in the whole program.
    """

    def __init__(
        self, segment: Segment, rank: int, *, peers: Sequence[Peer], names: Sequence[int]
    ) -> None:
        self.rank, self.size = rank, len(peers)
        self.peers, self.names = tuple(peers), tuple(names)
        self.words, self._bytes = segment.words(), memoryview(segment.memory)
        self.marks = self._bytes.cast("q")
        self.address = segment.address
        self._rung = 0

    def entitle(self, turn: int, title: bytes) -> int:
        """Write what this rank is doing, ``TITLE_NBYTES`` long; its mark, to be compared."""
        line = LINE_NBYTES * self.rank
        begin = line + _TITLES[turn]
        self._bytes[begin : begin + TITLE_NBYTES] = title
        mark = self.marks[((line + MARKS) >> 3) + turn] = _mark(title)
        return mark

    def titles(self, rank: int) -> tuple[str, ...]:
        """What a rank is doing and what it did before, by turn."""
        starts = (LINE_NBYTES * rank + start for start in _TITLES)
        return tuple(self._read(start, TITLE_NBYTES) for start in starts)

    def status(self, rank: int) -> int:
        """Whether a rank is there, has left, or has failed."""
        return int(self.words[(LINE_NBYTES * rank + _STATUS) >> 2])

    def declare(self, status: int, text: str = "") -> None:
        """Tell the others that this rank has left or failed, and why."""
        begin = LINE_NBYTES * self.rank
        said = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES)
        self._bytes[begin + _TEXT : begin + _TEXT + _TEXT_NBYTES] = said
        self.words[(begin + _STATUS) >> 2] = status
        futex.wake(self.address + begin + ARRIVED)
        for other in range(self.size):
            self.ring(other)

    def reason(self, rank: int) -> str:
        """Why a rank failed, in its own words."""
        return self._read(LINE_NBYTES * rank + _TEXT, _TEXT_NBYTES)

    def _read(self, begin: int, nbytes: int) -> str:
        return bytes(self._bytes[begin : begin + nbytes]).decode(errors="replace").strip("\0 ")

    def bell(self) -> int:
        """What stands on this rank's bell."""
        return int(self.words[(LINE_NBYTES * self.rank + _BELL) >> 2])

    def ring(self, rank: int) -> None:
        """Ring a rank's bell: something for it has changed.

        Everyone writes numbers that nobody else writes, so the word changes with every ring.
        """
        self._rung = (self._rung + 1) & 0x3FFFFF
        at = LINE_NBYTES * rank + _BELL
        self.words[at >> 2] = (self._rung * self.size + self.rank) & 0x7FFFFFFF
        futex.wake(self.address + at)

    def listen(self, heard: int) -> None:
        """Sleep until this rank's bell no longer stands at ``heard``; at most a slice of time."""
        futex.sleep(self.address + LINE_NBYTES * self.rank + _BELL, heard, SLICE)
