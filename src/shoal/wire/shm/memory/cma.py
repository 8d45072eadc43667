"""Read the memory of other ranks of the node (cross-memory attach), which saves one copy.

This module calls Linux's ``process_vm_readv`` through ctypes. The kernel allows this between
processes of one user, unless settings such as Yama's ptrace_scope or a container's seccomp profile
forbid it. So each rank tries it at rendezvous, and the ranks of a node read memory in this way only
if each rank can read all other ranks. No rank writes to another rank's memory in this way.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import secrets
from collections.abc import Sequence

from shoal.errors import PeerLost
from shoal.wire.shm.memory.barrier import PRESENT, Barrier
from shoal.wire.shm.options import DIRECT_MB, NEVER

_TOKEN_NBYTES = 16


class _Iovec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _iovecs, _count = ctypes.c_void_p, ctypes.c_ulong
    _readv.argtypes = (ctypes.c_int, _iovecs, _count, _iovecs, _count, ctypes.c_ulong)


def read(pid: int, source: int, *, target: int, nbytes: int) -> None:
    """Copy ``nbytes`` from address ``source`` of a process to address ``target`` of this one.

    Raises:
        OSError: the memory cannot be read.
    """
    if _readv is None:
        raise OSError("this system has no process_vm_readv")
    done = 0  # bytes copied
    while done < nbytes:
        local, remote = _Iovec(target + done, nbytes - done), _Iovec(source + done, nbytes - done)
        count = _readv(pid, ctypes.addressof(local), 1, ctypes.addressof(remote), 1, 0)
        if count <= 0:
            code = ctypes.get_errno() if count else errno.EFAULT
            raise OSError(code, os.strerror(code))
        done += count


class Token:
    """Random bytes in this process, which other ranks try to read while this object exists."""

    def __init__(self) -> None:
        content = secrets.token_bytes(_TOKEN_NBYTES)
        self._buffer = ctypes.create_string_buffer(content, _TOKEN_NBYTES)
        self.card = ctypes.addressof(self._buffer), content.hex()  # address, hex digits


def can_read(pid: int, card: Sequence[int | str]) -> bool:
    """Return whether this process can read the token of another. ``card`` is its ``Token.card``."""
    address, content = card
    buffer = ctypes.create_string_buffer(_TOKEN_NBYTES)
    try:
        read(pid, int(address), target=ctypes.addressof(buffer), nbytes=_TOKEN_NBYTES)
    except OSError:
        return False
    return buffer.raw.hex() == content


class CmaReader:
    """Reads the memory of other ranks. Callers use it for messages of at least ``least_nbytes``."""

    def __init__(self, barrier: Barrier, least_nbytes: int = NEVER) -> None:
        self._barrier, self.least_nbytes = barrier, least_nbytes

    def __call__(
        self, rank: int, source: int, *, target: int, nbytes: int, operation: str = ""
    ) -> None:
        """Copy from address ``source`` of a rank's process to address ``target`` of this process.

        ``operation`` is used in error messages. By default it is this rank's current collective.

        Raises:
            PeerLost: the memory cannot be read, or the rank failed or left before the end and may
                have overwritten the memory.
            ExchangeTimeout: the same happened, and a rank had failed because of a timeout.
        """
        barrier, headers = self._barrier, self._barrier.headers
        try:
            read(headers.peers[rank].pid, source, target=target, nbytes=nbytes)
        except OSError as error:
            operation = operation or barrier.operation
            barrier.check(operation, [rank], math.inf)
            lost = PeerLost(
                f"{operation}: the memory of rank {headers.names[rank]} cannot be read: {error}; "
                f"set {DIRECT_MB}=inf to use the shared segment instead"
            )
            barrier.record_failure(lost)
            raise lost from error
        if headers.status(rank) != PRESENT:
            barrier.check(operation or barrier.operation, [rank], math.inf)
