"""Find out on which node each process of a group runs, and whether it is alive.

A process is identified by its id and its start time, because the system may give the id of a dead
process to a new one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch._C._distributed_c10d import Store

_DEAD = "ZXx"
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a device"}


class NodeRendezvous(NamedTuple):
    """What a rank needs to connect to the other ranks of its group."""

    store: Store
    rank: int
    names: Sequence[int]  # the global rank of each rank of the group, for error messages
    seconds: float  # the timeout of a collective or a message


class Peer(NamedTuple):
    """A process of this node."""

    pid: int
    started: int  # start time in kernel ticks, or 0 if it is unknown

    @property
    def alive(self) -> bool:
        """Whether the process exists and is not a zombie."""
        return self.condition != "dead"

    @property
    def condition(self) -> str:
        """The state of the process for error messages, such as "running" or "dead"."""
        state, started = _read_state(self.pid)
        if state in _DEAD or started != self.started:
            return "dead"
        return _STATES.get(state, "running")


def this_process() -> Peer:
    """Return the :class:`Peer` of this process."""
    return Peer(os.getpid(), _read_state(os.getpid())[1])


def host_key() -> str:
    """Return a text that is equal for processes that can share memory (same machine and user).

    The kernel's boot id distinguishes machines that have the same name. The process-id namespace
    distinguishes containers on one machine. ``SHOAL_HOST_KEY`` is appended, so ranks with different
    values are treated as being on different nodes.
    """
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            link = os.path.islink(path)
            parts.append(os.readlink(path) if link else Path(path).read_text("ascii").strip())
        except OSError:
            parts.append(os.uname().nodename)
    return f"{'/'.join(parts)}/{os.getuid()}/{os.environ.get('SHOAL_HOST_KEY', '')}"


def _read_state(pid: int) -> tuple[str, int]:
    """Return the state letter (``X`` if it has ended) and the start time of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.isdir("/proc/self"):
            return _probe(pid)
        return "X", 0


def _probe(pid: int) -> tuple[str, int]:
    """Return ("R", 0) if the process exists, otherwise ("X", 0). For systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X", 0
    except PermissionError:
        pass
    return "R", 0


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Wait until all keys are set, and return their values. Use one request if possible."""
    if getattr(store, "has_extended_api", bool)():
        return list(store.multi_get(list(keys)))
    return [store.get(key) for key in keys]
