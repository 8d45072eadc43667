"""The barrier of the ranks of a node, which needs no common lock and no atomic operation.

Each rank has one *header* in the shared segment. Only that rank writes to it, except to ``bell``,
so no atomic operation is needed::

    byte 0        4       16       24       64      128   192          320          448     960
    +---------+--------+--------+--------+--------+------+------------+------------+--------+
    | arrived | sleeps | hash 0 | hash 1 | status | bell | signature0 | signature1 | reason |
    +---------+--------+--------+--------+--------+------+------------+------------+--------+
    '---------- one cache line ----------' '- a line each -'

To enter a barrier, a rank increments its own ``arrived`` and waits until no other ``arrived`` is
lower. So ranks are never more than one barrier apart. The other ranks read what a rank wrote before
barrier k between barriers k and k+1, and the rank may overwrite it after barrier k+1. So everything
that is written before a barrier has two places, which are used in turns (``turn`` 0 and 1). This
applies to the signatures here and to the data slots in ``buffers``.

After the first barrier of a collective each rank compares the signatures of all ranks, so ranks
that call different collectives get an error before any data is copied.
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
_ARRIVED, _STATUS, _BELL = 0, 64, 128  # byte offsets of words, each in its own cache line
_STATUS_WORDS = (_STATUS - _ARRIVED) >> 2  # distance from ``arrived`` to ``status`` in words
_SLEEPS_WORDS = 1  # distance from ``arrived`` to ``sleeps`` in words; it is 1 while the rank sleeps
_HASHES = 16  # byte offset of the hashes of the two signatures, 64 bits each
SIGNATURE_NBYTES = 128
_SIGNATURES = (192, 320)
_REASON, _REASON_NBYTES = 448, 512
PRESENT, LEFT, FAILED = 0, 1, 2
_SLEEP = futex.timespec(0.05)  # the longest sleep before a rank checks whether the others are alive
SPINS = 200  # about 150 us on an idle core, which is as long as a sleep and a wake-up take
_TIMEOUT_TEXT = "not done within"
sched_yield = getattr(os, "sched_yield", lambda: None)


def op_signature(text: str) -> bytes:
    """Return ``text`` as bytes, cut or padded to the size that :meth:`Barrier.begin` needs."""
    return text.encode()[:SIGNATURE_NBYTES].ljust(SIGNATURE_NBYTES)


@lru_cache(maxsize=1024)
def _hash(signature: bytes) -> int:
    """Return a 64-bit hash of a signature, because comparing texts would be slower."""
    return int.from_bytes(blake2b(signature, digest_size=8).digest(), "little", signed=True)


class RankHeaders:
    """The headers of all ranks, which are at the beginning of the segment. ``rank`` is this rank.

    ``peers`` are the processes of the ranks. ``names`` are the global ranks, for error messages.
    """

    def __init__(
        self, segment: Segment, rank: int, *, peers: Sequence[Peer], names: Sequence[int]
    ) -> None:
        self.rank, self.size = rank, len(peers)
        self.peers, self.names = tuple(peers), tuple(names)
        self.words, self._bytes = segment.words(), memoryview(segment.memory)
        self.hashes = self._bytes.cast("q")
        self.address = segment.address
        self._bell_count = 0

    def publish(self, turn: int, signature: bytes) -> int:
        """Write the signature and its hash to this rank's header, and return the hash."""
        header = HEADER_NBYTES * self.rank
        begin = header + _SIGNATURES[turn]
        self._bytes[begin : begin + SIGNATURE_NBYTES] = signature
        value = self.hashes[((header + _HASHES) >> 3) + turn] = _hash(signature)
        return value

    def signatures(self, rank: int) -> tuple[str, ...]:
        """Return the last two signatures of a rank: first that of turn 0, then that of turn 1."""
        starts = (HEADER_NBYTES * rank + start for start in _SIGNATURES)
        return tuple(self._text(start, SIGNATURE_NBYTES) for start in starts)

    def status(self, rank: int) -> int:
        """Return the status of a rank: ``PRESENT``, ``LEFT`` or ``FAILED``."""
        return int(self.words[(HEADER_NBYTES * rank + _STATUS) >> 2])

    def set_status(self, status: int, reason: str = "") -> None:
        """If this rank is ``PRESENT``, set it to ``LEFT`` or ``FAILED``, and wake all ranks."""
        if self.status(self.rank) != PRESENT:
            return
        header = HEADER_NBYTES * self.rank
        text = reason.encode()[:_REASON_NBYTES].ljust(_REASON_NBYTES)
        self._bytes[header + _REASON : header + _REASON + _REASON_NBYTES] = text
        self.words[(header + _STATUS) >> 2] = status
        futex.wake(self.address + header + _ARRIVED)
        for other in range(self.size):
            self.ring_bell(other)

    def reason(self, rank: int) -> str:
        """Return the reason that a failed rank has written to its header."""
        return self._text(HEADER_NBYTES * rank + _REASON, _REASON_NBYTES)

    def _text(self, begin: int, nbytes: int) -> str:
        return bytes(self._bytes[begin : begin + nbytes]).decode(errors="replace").strip("\0 ")

    def bell(self) -> int:
        """Return the value of this rank's bell, which changes each time it is rung."""
        return int(self.words[(HEADER_NBYTES * self.rank + _BELL) >> 2])

    def ring_bell(self, rank: int) -> None:
        """Change the bell of a rank and wake it, because there is something new for it.

        No two ranks write the same value, and no rank writes a value twice in a row, so the bell
        changes every time.
        """
        self._bell_count = (self._bell_count + 1) & 0x3FFFFF
        offset = HEADER_NBYTES * rank + _BELL
        self.words[offset >> 2] = (self._bell_count * self.size + self.rank) & 0x7FFFFFFF
        futex.wake(self.address + offset)

    def sleep_until_rung(self, value: int) -> None:
        """Sleep while this rank's bell has the value ``value``, at most 50 ms."""
        futex.sleep(self.address + HEADER_NBYTES * self.rank + _BELL, value, _SLEEP)


class Barrier:
    """The barrier of the ranks of a group on one node. ``seconds`` is its timeout."""

    def __init__(self, headers: RankHeaders, seconds: float) -> None:
        self.headers, self.seconds = headers, seconds
        self._count, self._turn = 0, 0
        self._signatures, self._hashes = [b"", b""], [0, 0]  # this rank's own, by turn
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
        """Prepare for a collective that runs in the caller's thread, or in the background."""
        self.require_usable()
        # In the background, other threads of this process may need the core and the GIL.
        self._spins = 0 if background else SPINS

    def require_usable(self) -> None:
        """Raise PeerLost if an earlier operation of the group failed."""
        if self._failure:
            raise PeerLost(f"this group has failed before: {self._failure}; create a new group")

    def record_failure(self, error: BaseException) -> None:
        """Make the group unusable after an error, and tell the other ranks.

        LayoutMismatch is raised on all ranks at the same call, so after it the group stays usable.
        """
        if not isinstance(error, LayoutMismatch) and not self._failure:
            # keep only the text, because the traceback of the error refers to the group
            self._failure = str(error) or type(error).__name__
            self.headers.set_status(FAILED, str(error))

    def begin(self, signature: bytes) -> None:
        """Enter the first barrier of a collective, and check that all ranks call the same one.

        Raises:
            LayoutMismatch: ranks call different collectives, which the message shows.
        """
        self._turn = turn = self._turn ^ 1
        if self._signatures[turn] != signature:
            self._signatures[turn] = signature
            self._hashes[turn] = self.headers.publish(turn, signature)
        self.wait()
        hashes, own = self.headers.hashes, self._hashes[turn]
        for index in self._other_hashes:
            if hashes[index + turn] != own:
                raise LayoutMismatch(self._describe_mismatch())

    def wait(self) -> None:
        """Wait until every rank has entered this barrier.

        1. Increment this rank's ``arrived``, and wake the ranks that sleep on this word.
        2. For each other rank whose ``arrived`` is still behind, spin and then sleep on that word.

        A processor may execute a store after a later load. The lock between the two steps is a
        memory fence that prevents this. Either this rank sees that another rank sleeps and wakes
        it, or the other rank sees the new ``arrived`` before it sleeps. No other thread uses the
        lock.

        Raises:
            PeerLost: a rank is dead, has left the group or has failed.
            ExchangeTimeout: a rank has not entered the barrier within the timeout.
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
            if words[word + _STATUS_WORDS] == FAILED:  # checked even if that rank has entered
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
            sched_yield()  # the other rank may need this core
        end = time.monotonic() + self.seconds
        words[self._word + _SLEEPS_WORDS] = 1
        try:
            while words[word] == behind:
                futex.sleep(address, behind, _SLEEP)
                late = [rank for w, _, rank in self._others if words[w] == behind]
                if words[word] == behind:
                    self.check(self.operation, late, end)
        except FaultError:
            if words[word] == behind:  # otherwise the rank has arrived meanwhile
                raise
        finally:
            words[self._word + _SLEEPS_WORDS] = 0

    def check(self, operation: str, awaited: Iterable[int], end: float) -> None:
        """Raise if a rank has failed, an ``awaited`` rank is dead or has left, or ``end`` is past.

        ``operation`` is used in the error message. ``end`` is a time of ``time.monotonic``.
        """
        headers, late = self.headers, tuple(awaited)
        for rank in range(headers.size):
            if rank != headers.rank and headers.status(rank) == FAILED:
                reason = headers.reason(rank)
                # if that rank timed out, this rank was about to time out too
                kind = ExchangeTimeout if _TIMEOUT_TEXT in reason else PeerLost
                raise kind(f"{operation}: rank {headers.names[rank]} gave up: {reason}")
        for rank in late:
            if not headers.peers[rank].alive:
                raise PeerLost(f"{operation}: {self._describe(rank)}")
            if headers.status(rank) == LEFT:
                raise PeerLost(f"{operation}: rank {headers.names[rank]} has destroyed the group")
        if time.monotonic() > end:
            missing = "; ".join(self._describe(rank) for rank in late)
            text = f"{operation}: {_TIMEOUT_TEXT} {self.seconds:g} s; waiting for: {missing}"
            raise ExchangeTimeout(text)

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
        return f"ranks called different collectives: {sides}; all ranks must call the same one"
