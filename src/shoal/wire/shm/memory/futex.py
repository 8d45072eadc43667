"""Sleep until a word of shared memory changes, with Linux's futex, called through ctypes.

A sleeping rank uses no processor time. On other systems and unknown processors, :func:`sleep` only
sleeps for a short time, and the caller checks the word in a loop.
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
    """Return libc's ``syscall``, or None without futex. Declared types make calls twice as fast."""
    if _CALL is None:
        return None
    entry = ctypes.CDLL(None, use_errno=True).syscall
    entry.restype = ctypes.c_long
    number, address = ctypes.c_long, ctypes.c_void_p
    entry.argtypes = (number, address, ctypes.c_int, ctypes.c_uint32, address)
    return entry


_syscall = _load_syscall()


def timespec(seconds: float) -> ctypes.Structure:
    """Return a time limit for :func:`sleep`, which can be used many times."""
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def sleep(address: int, expected: int, limit: ctypes.Structure) -> None:
    """Sleep while the aligned 32-bit word at ``address`` is ``expected``, for ``limit`` at most.

    The function may also return earlier, so the caller must check the word again.
    """
    if _syscall is None:
        time.sleep(NAP_SECONDS)
    else:
        _syscall(_CALL, address, _WAIT, expected & 0xFFFFFFFF, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake all threads that sleep on the word at ``address``."""
    if _syscall is not None:
        _syscall(_CALL, address, _WAKE, _ALL, None)
