"""Memory that the ranks of one node share. One rank creates it, and all ranks map it.

A segment is an anonymous file (``memfd_create``), which the other ranks open through
``/proc/<pid>/fd``, so no file remains if all ranks are killed. If this call is missing or fails,
the segment is a file in /dev/shm or in the temporary directory, which is deleted as soon as all
ranks have mapped it. The kernel allocates pages when they are first used, so unused parts need no
memory.
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
_USABLE = 0.9  # share of the free bytes of a file system that a segment may use


class Segment:
    """A mapped segment, with its bytes and their address in this process."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(descriptor, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def words(self) -> memoryview:
        """Return the same bytes as signed 32-bit words."""
        return memoryview(self.memory).cast("i")


class Offer(NamedTuple):
    """A segment that this process created. It stays open until all ranks have mapped it."""

    descriptor: int
    path: str
    nbytes: int
    linked: bool  # whether close() must delete the file

    def map(self) -> Segment:
        """Map the segment in this process."""
        return Segment(self.descriptor, self.nbytes)

    def close(self) -> None:
        """Close the file, and delete it if ``linked``. Processes that mapped it keep the memory."""
        os.close(self.descriptor)
        if self.linked:
            with suppress(FileNotFoundError):
                os.unlink(self.path)


def round_to_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def create(nbytes: int) -> Offer:
    """Create a segment of at least ``nbytes``, filled with zeros.

    Raises:
        UsageError: no file system has enough space.
    """
    nbytes = round_to_pages(max(nbytes, 1))
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
            return Offer(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", nbytes, linked=False)
    return _create_file(nbytes)


def _create_file(nbytes: int) -> Offer:
    folders = [p for p in (_SHARED, tempfile.gettempdir()) if os.access(p, os.W_OK)]
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    for folder in folders:
        if nbytes > free[folder] * _USABLE:
            continue
        if folder != _SHARED:
            text = "%s has not enough space, so the segment is a file in %s, which is slower"
            log.warning(text, _SHARED, folder)
        descriptor, path = tempfile.mkstemp(prefix="shoal-", dir=folder)  # mode 0600
        os.ftruncate(descriptor, nbytes)
        return Offer(descriptor, path, nbytes, linked=True)
    space = ", ".join(f"{folder} has {n:,} bytes free" for folder, n in free.items())
    space = space or "no folder is writable"
    raise UsageError(
        f"there is no space for a segment of {nbytes:,} bytes ({space}); enlarge /dev/shm, set "
        "SHOAL_SHM_MB to a smaller number, or use the gloo backend"
    )


def map_from(path: str, nbytes: int) -> Segment:
    """Map the segment at ``path``, which another process has created.

    Raises:
        OSError: this process cannot open or map the segment.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size < nbytes:
            raise OSError(f"{path} is smaller than {nbytes:,} bytes")
        return Segment(descriptor, nbytes)
    finally:
        os.close(descriptor)
