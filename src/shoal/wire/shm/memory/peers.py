"""The processes of a group: which node they run on, whether they live, what is in their store.

A process is identified by its id and its start time, so that a new process which was given the id
of a dead rank is not taken for that rank.
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
    """What a rank knows of its group before it has connected to the other ranks."""

    store: Store
    rank: int
    names: Sequence[int]  # the global rank of each rank of the group, used in messages
    seconds: float  # the timeout of a collective


class Peer(NamedTuple):
    """A process of this node."""

    pid: int
    started: int  # in kernel ticks; 0 where unknown

    @property
    def alive(self) -> bool:
        """Whether the process runs; a zombie does not."""
        return self.condition != "dead"

    @property
    def condition(self) -> str:
        """The state of the process in words."""
        state, started = _read_state(self.pid)
        if state in _DEAD or started != self.started:
            return "dead"
        return _STATES.get(state, "running")


def this_process() -> Peer:
    """Return this process."""
    return Peer(os.getpid(), _read_state(os.getpid())[1])


def host_key() -> str:
    """Return a text that is equal for processes of one running system with the same process ids.

    The kernel's boot id distinguishes machines that have the same name; the process-id namespace
    distinguishes containers that share a kernel. ``SHOAL_HOST_KEY`` is appended: ranks that differ
    in it are treated as being on different nodes.
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
    """Return the state letter and the start time of a process; ``X`` for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.isdir("/proc/self"):
            return _probe(pid)
        return "X", 0


def _probe(pid: int) -> tuple[str, int]:
    """Without /proc: find out only whether a signal would arrive."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X", 0
    except PermissionError:
        pass
    return "R", 0


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Wait until all keys are set, and return their values; in one request if the store can."""
    if getattr(store, "has_extended_api", bool)():
        return list(store.multi_get(list(keys)))
    return [store.get(key) for key in keys]
