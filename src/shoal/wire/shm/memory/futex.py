"""Sleep until a word of shared memory changes: Linux's futex, called through ctypes.

Who waits here costs no processor time. Where there is no futex (another system or processor) the
same wait is a short sleep, again and again.
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


def _declared() -> ctypes._NamedFuncPointer | None:
    """The kernel's entry, with types declared once: undeclared ones double the cost of a call."""
    if _CALL is None:
        return None
    entry = ctypes.CDLL(None, use_errno=True).syscall
    entry.restype = ctypes.c_long
    number, address = ctypes.c_long, ctypes.c_void_p
    entry.argtypes = (number, address, ctypes.c_int, ctypes.c_uint32, address)
    return entry


_syscall = _declared()


def timespec(seconds: float) -> ctypes.Structure:
    """A relative time limit for :func:`sleep`, made once and used often."""
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def sleep(address: int, seen: int, limit: ctypes.Structure) -> None:
    """Sleep while the word at ``address`` is ``seen``; until woken, or the limit, or for no reason.

    Args:
        address: of an aligned 32-bit word of shared memory.
        seen: its value when last looked at.
        limit: from :func:`timespec`.
    """
    if _syscall is None:
        time.sleep(NAP_SECONDS)
    else:
        _syscall(_CALL, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake everyone who sleeps on the word at ``address``."""
    if _syscall is not None:
        _syscall(_CALL, address, _WAKE, _ALL, None)
