"""Sleep until a word of shared memory changes: Linux's futex, called through ctypes.

A sleeping rank uses no processor time. Without a futex (another system or processor), the wait is a
loop of short sleeps.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_CALL = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
NAP_SECONDS = 0.0005


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _load_syscall() -> ctypes._NamedFuncPointer | None:
    """Load ``syscall`` and declare its types: undeclared types double the cost of a call."""
    if _CALL is None:
        return None
    entry = ctypes.CDLL(None, use_errno=True).syscall
    entry.restype = ctypes.c_long
    number, address = ctypes.c_long, ctypes.c_void_p
    entry.argtypes = (number, address, ctypes.c_int, ctypes.c_uint32, address)
    return entry


_syscall = _load_syscall()


def timespec(seconds: float) -> ctypes.Structure:
    """Return a relative time limit for :func:`sleep`; create it once and use it often."""
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def sleep(address: int, expected: int, limit: ctypes.Structure) -> None:
    """Sleep while the aligned 32-bit word at ``address`` is ``expected``, for ``limit`` at most.

    May also return earlier, without a reason.
    """
    if _syscall is None:
        time.sleep(NAP_SECONDS)
    else:
        _syscall(_CALL, address, _WAIT, expected & 0xFFFFFFFF, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake all threads that sleep on the word at ``address``."""
    if _syscall is not None:
        _syscall(_CALL, address, _WAKE, _ALL, None)
