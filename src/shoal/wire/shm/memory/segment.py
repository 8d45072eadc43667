"""Memory that the ranks of one host share: made by one of them, mapped by all.

A segment has no name that could be left behind. It is an anonymous file (``memfd_create``) which
the others open through ``/proc/<pid>/fd``; where the system has none, a private file of /dev/shm or
of the temporary directory, unlinked as soon as everyone has mapped it. Pages are taken only when
first touched, so a large segment that is hardly used costs little.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from typing import NamedTuple

from shoal.errors import UsageError

log = logging.getLogger(__name__)
_SHARED = "/dev/shm"
_PAGE = mmap.PAGESIZE
_SPARE = 0.9  # of a file system's free bytes: the rest is for its other users


class Segment:
    """A mapped segment: its bytes, and where they begin in this process."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(descriptor, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def words(self) -> memoryview:
        """The same bytes as signed 32-bit words."""
        return memoryview(self.memory).cast("i")


class Offer(NamedTuple):
    """A segment made here, and how others find it; held open until they have it."""

    descriptor: int
    path: str
    nbytes: int
    linked: bool  # a file with a name, to be unlinked

    def withdraw(self) -> None:
        """Leave no way to the segment but the mappings that exist."""
        os.close(self.descriptor)
        if self.linked:
            with suppress(FileNotFoundError):
                os.unlink(self.path)


def rounded(nbytes: int) -> int:
    """Up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def make(nbytes: int) -> Offer:
    """A new segment of at least ``nbytes``, filled with zeros.

    Raises:
        UsageError: nowhere is room for it.
    """
    nbytes = rounded(max(nbytes, 1))
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
            return Offer(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", nbytes, linked=False)
    return _file(nbytes)


def _file(nbytes: int) -> Offer:
    places = [p for p in (_SHARED, tempfile.gettempdir()) if os.access(p, os.W_OK)]
    free = {place: shutil.disk_usage(place).free for place in places}
    for place in places:
        if nbytes > free[place] * _SPARE:
            continue
        if place != _SHARED:
            log.warning("no room in %s: the segment is a file of %s, slower", _SHARED, place)
        descriptor, path = tempfile.mkstemp(prefix="shoal-", dir=place)  # mode 0600
        os.ftruncate(descriptor, nbytes)
        return Offer(descriptor, path, nbytes, linked=True)
    found = ", ".join(f"{place} has {room:,} free" for place, room in free.items()) or "none found"
    raise UsageError(
        f"no place for a shared segment of {nbytes:,} bytes ({found}); enlarge /dev/shm, set "
        "SHOAL_SHM_MB to a smaller number, or use the gloo backend"
    )


def map_own(offer: Offer) -> Segment:
    """Map the segment that this process made."""
    return Segment(offer.descriptor, offer.nbytes)


def map_from(path: str, nbytes: int) -> Segment:
    """Map the segment that another process offers.

    Raises:
        OSError: it cannot be reached from here.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size < nbytes:
            raise OSError(f"{path} is smaller than the {nbytes:,} bytes offered")
        return Segment(descriptor, nbytes)
    finally:
        os.close(descriptor)
