"""What each rank writes about itself in the shared segment, for the others to read.

Every rank owns one *line* and is the only one to write it (its bell apart), so that no atomic
operation is needed. A line holds the count of meetings the rank has come to, whether it is still
there, what it is doing, and, if it gave up, why.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from shoal.wire.shm import futex
from shoal.wire.shm.peers import Peer
from shoal.wire.shm.segment import Segment

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
