"""Who the other ranks of this host are, and whether they still live.

A rank is known by its process id and the time it was started, so that a process id which the
system has given to somebody else is not taken for the rank.

Read what all ranks have told a store; every kind of store can do it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch._C._distributed_c10d import Store

_DEAD = "ZXx"
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a device"}


class Peer(NamedTuple):
    """A process of this host.

    Attributes:
        pid: its process id.
        started: when, in the kernel's ticks; 0 where that is not known.
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it runs: neither gone, nor dead and not yet reaped by its parent."""
        state, started = _look(self.pid)
        return state not in _DEAD and started == self.started

    @property
    def condition(self) -> str:
        """What the system says of it, in words."""
        state, started = _look(self.pid)
        if state in _DEAD or started != self.started:
            return "dead"
        return _STATES.get(state, "running")


def myself() -> Peer:
    """This process."""
    return Peer(os.getpid(), _look(os.getpid())[1])


def host_key() -> str:
    """Equal for processes of one running system that can see each other's process ids.

    The kernel's boot id tells machines apart that have one name; the namespace of process ids
    tells containers apart that share a kernel. ``SHOAL_HOST_KEY`` is added: ranks that differ in it
    are treated as being on different hosts.
    """
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(
                os.readlink(path) if os.path.islink(path) else Path(path).read_text("ascii").strip()
            )
        except OSError:
            parts.append(os.uname().nodename)
    return f"{'/'.join(parts)}/{os.getuid()}/{os.environ.get('SHOAL_HOST_KEY', '')}"


def _look(pid: int) -> tuple[str, int]:
    """The state letter and the start time of a process; of one that is gone, ``X``."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        return ("X", 0) if os.path.isdir("/proc/self") else _signal(pid)
    except OSError:
        return "X", 0
    return fields[0].decode(), int(fields[19])


def _signal(pid: int) -> tuple[str, int]:
    """Without /proc all that can be asked is whether a signal would arrive."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X", 0
    except PermissionError:
        pass
    return "R", 0


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """The values of keys, once all are there; in one message where the store can."""
    if getattr(store, "has_extended_api", bool)():
        return list(store.multi_get(list(keys)))
    return [store.get(key) for key in keys]
