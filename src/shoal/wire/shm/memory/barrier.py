"""The barrier of the ranks of a node, without a common lock and without an atomic operation.

Each rank owns one *header* in the shared segment, and only that rank writes to it (its bell apart),
so no atomic operation is needed::

    byte 0        4       16       24       64      128   192          320          448     960
    +---------+--------+--------+--------+--------+------+------------+------------+--------+
    | arrived | sleeps | hash 0 | hash 1 | status | bell | signature0 | signature1 | reason |
    +---------+--------+--------+--------+--------+------+------------+------------+--------+
    '---------- one cache line ----------' '- a line each -'

To enter a barrier, a rank increments its own ``arrived`` and waits until no other ``arrived`` is
behind. Hence ranks are never more than one barrier apart: what a rank wrote before a barrier is
read by the others after it and before the next one, and after that next one it may be overwritten.
Therefore everything that is written before each barrier exists twice and is used in turns: the op
signatures here, the data slots in ``buffers``.

After the first barrier of a collective each rank compares the signatures of all ranks, so a rank
that called another collective is found before a byte of data moves.
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

HEADER_NBYTES = 1024
_ARRIVED, _STATUS, _BELL = 0, 64, 128  # words, each in a cache line of its own
_STATUS_WORDS = (_STATUS - _ARRIVED) >> 2  # from ``arrived`` to ``status``, in words
_SLEEPS_WORDS = 1  # from ``arrived``: whether the rank sleeps until another one arrives
_HASHES = 16  # 64 bits each, in the cache line of ``arrived``: of the two signatures
SIGNATURE_NBYTES = 128
_SIGNATURES = (192, 320)
_REASON, _REASON_NBYTES = 448, 512
PRESENT, LEFT, FAILED = 0, 1, 2
_SLEEP = futex.timespec(0.05)  # the longest sleep before checking that all ranks still live
SPINS = 200  # about 150 microseconds on an idle core, which is what sleeping and waking cost
_LATE = "not done within"
sched_yield = getattr(os, "sched_yield", lambda: None)


def op_signature(text: str) -> bytes:
    """Return the signature of a collective, as :meth:`Barrier.begin` takes it."""
    return text.encode()[:SIGNATURE_NBYTES].ljust(SIGNATURE_NBYTES)


@lru_cache(maxsize=1024)
def _hash(signature: bytes) -> int:
    """Return 64 bits that differ if signatures differ, except once in 2**64 times."""
    return int.from_bytes(blake2b(signature, digest_size=8).digest(), "little", signed=True)


class RankHeaders:
    """The headers of a group's ranks, at the beginning of the segment, as one rank uses them.

    ``peers`` are the processes of the ranks; ``names`` their global ranks, used in messages.
    """

    def __init__(
        self, segment: Segment, rank: int, *, peers: Sequence[Peer], names: Sequence[int]
    ) -> None:
        self.rank, self.size = rank, len(peers)
        self.peers, self.names = tuple(peers), tuple(names)
        self.words, self._bytes = segment.words(), memoryview(segment.memory)
        self.hashes = self._bytes.cast("q")
        self.address = segment.address
        self._ring_count = 0

    def publish(self, turn: int, signature: bytes) -> int:
        """Write the signature of this rank's collective; return its hash."""
        header = HEADER_NBYTES * self.rank
        begin = header + _SIGNATURES[turn]
        self._bytes[begin : begin + SIGNATURE_NBYTES] = signature
        value = self.hashes[((header + _HASHES) >> 3) + turn] = _hash(signature)
        return value

    def signatures(self, rank: int) -> tuple[str, ...]:
        """Return the last two signatures of a rank, by turn."""
        starts = (HEADER_NBYTES * rank + start for start in _SIGNATURES)
        return tuple(self._text(start, SIGNATURE_NBYTES) for start in starts)

    def status(self, rank: int) -> int:
        """Return whether a rank is present, has left, or has failed."""
        return int(self.words[(HEADER_NBYTES * rank + _STATUS) >> 2])

    def set_status(self, status: int, reason: str = "") -> None:
        """Publish ``LEFT`` or ``FAILED`` and wake all ranks; only the first call has an effect."""
        if self.status(self.rank) != PRESENT:
            return
        header = HEADER_NBYTES * self.rank
        text = reason.encode()[:_REASON_NBYTES].ljust(_REASON_NBYTES)
        self._bytes[header + _REASON : header + _REASON + _REASON_NBYTES] = text
        self.words[(header + _STATUS) >> 2] = status
        futex.wake(self.address + header + _ARRIVED)
        for other in range(self.size):
            self.ring(other)

    def reason(self, rank: int) -> str:
        """Return why a rank failed, as it published it."""
        return self._text(HEADER_NBYTES * rank + _REASON, _REASON_NBYTES)

    def _text(self, begin: int, nbytes: int) -> str:
        return bytes(self._bytes[begin : begin + nbytes]).decode(errors="replace").strip("\0 ")

    def bell(self) -> int:
        """Return the value of this rank's bell."""
        return int(self.words[(HEADER_NBYTES * self.rank + _BELL) >> 2])

    def ring(self, rank: int) -> None:
        """Ring a rank's bell: there is something new for it.

        Each rank writes numbers that no other rank writes, so every ring changes the word.
        """
        self._ring_count = (self._ring_count + 1) & 0x3FFFFF
        at = HEADER_NBYTES * rank + _BELL
        self.words[at >> 2] = (self._ring_count * self.size + self.rank) & 0x7FFFFFFF
        futex.wake(self.address + at)

    def sleep_until_rung(self, value: int) -> None:
        """Sleep while this rank's bell has this value; at most 50 ms."""
        futex.sleep(self.address + HEADER_NBYTES * self.rank + _BELL, value, _SLEEP)


class Barrier:
    """The barrier of one group, as one rank uses it; ``seconds`` is its timeout."""

    def __init__(self, headers: RankHeaders, seconds: float) -> None:
        self.headers, self.seconds = headers, seconds
        self._count, self._turn = 0, 0
        self._signatures, self._hashes = [b"", b""], [0, 0]  # of this rank, by turn
        own = HEADER_NBYTES * headers.rank + _ARRIVED
        self._word, self._address = own >> 2, headers.address + own
        others = [(r, HEADER_NBYTES * r) for r in range(headers.size) if r != headers.rank]
        arrived = [(r, start + _ARRIVED) for r, start in others]
        self._others = [(start >> 2, headers.address + start, r) for r, start in arrived]
        self._other_hashes = [(start + _HASHES) >> 3 for _, start in others]
        self._fence = threading.Lock()
        self._spins = SPINS
        self._failure = ""

    def prepare(self, *, background: bool) -> None:
        """Prepare for a collective that the caller waits for, or that runs in the background."""
        self.require_usable()
        # In the background, other threads of this process may need the core and the GIL.
        self._spins = 0 if background else SPINS

    def require_usable(self) -> None:
        """Raise PeerLost if an earlier operation failed: then the ranks are out of step."""
        if self._failure:
            raise PeerLost(f"the group has failed before: {self._failure}")

    def record_failure(self, error: BaseException) -> None:
        """Record a fatal error and publish it.

        All ranks see a LayoutMismatch alike, so after one the group stays usable.
        """
        if not isinstance(error, LayoutMismatch) and not self._failure:
            # the text only: the error itself would keep the group alive
            self._failure = str(error) or type(error).__name__
            self.headers.set_status(FAILED, str(error))

    def begin(self, signature: bytes) -> None:
        """Enter the first barrier of a collective, and check that all ranks call the same one.

        Raises:
            LayoutMismatch: a rank calls another collective; the message shows all of them.
        """
        self._turn = turn = self._turn ^ 1
        if self._signatures[turn] != signature:
            self._signatures[turn] = signature
            self._hashes[turn] = self.headers.publish(turn, signature)
        self.wait()
        hashes, own = self.headers.hashes, self._hashes[turn]
        for at in self._other_hashes:
            if hashes[at + turn] != own:
                raise LayoutMismatch(self._describe_mismatch())

    def wait(self) -> None:
        """Wait until every rank has entered this barrier.

        1. Increment this rank's ``arrived``; wake the ranks that sleep on it.
        2. For each other rank whose ``arrived`` is still behind: spin, then sleep on that word.

        A processor may delay a store past a later load. The fence between the two steps forbids
        this: either this rank sees that another one sleeps and wakes it, or the other one sees the
        new ``arrived`` before it falls asleep. The lock is this rank's own, so it never blocks.

        Raises:
            PeerLost: a rank has died, left the group or failed.
            ExchangeTimeout: a rank has not arrived in time.
        """
        words, behind = self.headers.words, self._count
        self._count = now = (behind + 1) & 0x3FFFFFFF
        words[self._word] = now
        self._fence.acquire()
        self._fence.release()
        for word, _, _ in self._others:
            if words[word + _SLEEPS_WORDS]:
                futex.wake(self._address)
                break
        for word, address, _ in self._others:
            if words[word] == behind:
                self._wait_for(word, address, behind)
            if words[word + _STATUS_WORDS] == FAILED:  # it arrived, but gave up on another rank
                self.check(self.operation, (), math.inf)

    @property
    def operation(self) -> str:
        """The signature of the collective that this rank runs, or ran last."""
        return self._signatures[self._turn].decode().strip()

    def _wait_for(self, word: int, address: int, behind: int) -> None:
        words = self.headers.words
        for _ in range(self._spins):
            if words[word] != behind:
                return
            sched_yield()  # with fewer cores than ranks, the other rank may need this one
        end = time.monotonic() + self.seconds
        words[self._word + _SLEEPS_WORDS] = 1
        try:
            while words[word] == behind:
                futex.sleep(address, behind, _SLEEP)
                late = [rank for w, _, rank in self._others if words[w] == behind]
                if words[word] == behind:
                    self.check(self.operation, late, end)
        except FaultError:
            if words[word] == behind:  # else the rank arrived at the last moment
                raise
        finally:
            words[self._word + _SLEEPS_WORDS] = 0

    def check(self, operation: str, awaited: Iterable[int], end: float) -> None:
        """Raise if a rank failed, or an ``awaited`` one died or left, or ``end`` has passed.

        ``operation`` is for the message; ``end`` is a time on the monotonic clock.
        """
        headers, late = self.headers, tuple(awaited)
        for rank in range(headers.size):
            if rank != headers.rank and headers.status(rank) == FAILED:
                reason = headers.reason(rank)
                # if that rank timed out, its timeout ended a moment before this rank's
                kind = ExchangeTimeout if _LATE in reason else PeerLost
                raise kind(f"{operation}: rank {headers.names[rank]} gave up: {reason}")
        for rank in late:
            if not headers.peers[rank].alive:
                raise PeerLost(f"{operation}: {self._describe(rank)}, while others needed it")
            if headers.status(rank) == LEFT:
                raise PeerLost(f"{operation}: rank {headers.names[rank]} has destroyed the group")
        if time.monotonic() > end:
            ranks = "; ".join(self._describe(rank) for rank in late)
            raise ExchangeTimeout(f"{operation}: {_LATE} {self.seconds:g} s, because {ranks}")

    def _describe(self, rank: int) -> str:
        headers, peer = self.headers, self.headers.peers[rank]
        now, before = (headers.signatures(rank)[turn] for turn in (self._turn, self._turn ^ 1))
        last = now if now == self.operation else before
        return (
            f"rank {headers.names[rank]} (process {peer.pid}) is {peer.condition}; "
            f"its last collective was {last or 'none'}"
        )

    def _describe_mismatch(self) -> str:
        ranks: dict[str, list[str]] = {}
        for rank, name in enumerate(self.headers.names):
            ranks.setdefault(self.headers.signatures(rank)[self._turn], []).append(str(name))
        sides = "; ".join(f"{text} on rank {', '.join(names)}" for text, names in ranks.items())
        return f"ranks called different collectives: {sides}; all must call the same"
