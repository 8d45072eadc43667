"""Read the memory of other ranks of the host: one copy, where the segment takes two.

That is Linux's process_vm_readv, through ctypes. The kernel allows it among processes of one user,
unless told to be strict (Yama's ptrace_scope, a container's seccomp profile). So ranks try it when
they meet, and a group uses it if each can read all others. Nothing is ever written to another.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import secrets
import sys
from collections.abc import Sequence

from shoal.errors import PeerLost
from shoal.wire.shm.memory.barrier import PRESENT, Board
from shoal.wire.shm.options import megabytes

LEAST = "SHOAL_SHM_DIRECT_MB"
"""Environment variable: from how many megabytes on data is read where it lies; inf: never."""
_LEAST_MB = 1.0  # from here on one copy less is worth one more meeting
NEVER = sys.maxsize
_TOKEN_NBYTES = 16


class _Iovec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _declared() -> ctypes._NamedFuncPointer | None:
    """The system's entry, with types declared once; None where it has none."""
    entry: ctypes._NamedFuncPointer | None
    entry = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if entry is not None:
        entry.restype = ctypes.c_ssize_t
        extents, count = ctypes.c_void_p, ctypes.c_ulong
        entry.argtypes = (ctypes.c_int, extents, count, extents, count, ctypes.c_ulong)
    return entry


_readv = _declared()


def read(pid: int, source: int, *, target: int, nbytes: int) -> None:
    """Copy memory of another process into this one's.

    Raises:
        OSError: the system does not let it.
    """
    if _readv is None:
        raise OSError("this system has no process_vm_readv")
    done = 0
    while done < nbytes:
        here, there = _Iovec(target + done, nbytes - done), _Iovec(source + done, nbytes - done)
        got = _readv(pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
        if got <= 0:
            code = ctypes.get_errno() if got else errno.EFAULT
            raise OSError(code, os.strerror(code))
        done += got


class Token:
    """Random bytes of this process for others to find, as long as this object lives."""

    def __init__(self) -> None:
        text = secrets.token_bytes(_TOKEN_NBYTES)
        self._room = ctypes.create_string_buffer(text, _TOKEN_NBYTES)
        self.card = (ctypes.addressof(self._room), text.hex())


def least_nbytes() -> int:
    """From where on messages should be read, by option.

    Raises:
        BadArgument: the option is no number of megabytes.
    """
    why = "must be a number of megabytes, 0 or more, or inf"
    least = megabytes(LEAST, _LEAST_MB, valid=lambda found: found >= 0, why=why)
    return int(min(least * 2**20, NEVER))


def finds(pid: int, card: Sequence[int | str]) -> bool:
    """Whether the token of a process can be read, and is the one it told."""
    address, text = card
    room = ctypes.create_string_buffer(_TOKEN_NBYTES)
    try:
        read(pid, int(address), target=ctypes.addressof(room), nbytes=_TOKEN_NBYTES)
    except OSError:
        return False
    return room.raw.hex() == text


class Reader:
    """Reads what other ranks of a group have told the address of.

    Args:
        board: of the group.
        least_nbytes: of a message that is read; what is shorter goes through the segment.
    """

    def __init__(self, board: Board, least_nbytes: int = NEVER) -> None:
        self._board, self.least_nbytes = board, least_nbytes

    def __call__(self, rank: int, source: int, *, target: int, nbytes: int, what: str = "") -> None:
        """Copy a rank's memory to an address of this process.

        Args:
            rank: whose.
            source: its address there.
            target: where to.
            nbytes: how many.
            what: is being done; a collective by default.

        Raises:
            PeerLost: it cannot be read, or the rank has meanwhile ceased to keep it as it was.
        """
        board, lines = self._board, self._board.lines
        try:
            read(lines.peers[rank].pid, source, target=target, nbytes=nbytes)
        except OSError as error:
            what = what or board.title
            board.check(what, [rank], math.inf)
            name = lines.names[rank]
            lost = PeerLost(
                f"{what}: rank {name} cannot be read: {error}; {LEAST}=inf goes without"
            )
            board.broke(lost)
            raise lost from error
        if lines.status(rank) != PRESENT:
            board.check(what or board.title, [rank], math.inf)
