"""One process's view of its run, from its environment and from joining the other processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import Store

from shoal.runtime.world.env import RankEnv
from shoal.runtime.world.failures import FailureWatcher

DEFAULT_SECONDS = 300.0
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class World:
    """One process's view of its run, made by :func:`shoal.runtime.world.join.join`.

    ``store`` and ``watcher`` are None in a run of one process, unless its script made a process
    group. Servers have no watcher.
    """

    env: RankEnv
    device: torch.device
    backend: str  # "none" if there is no process group
    store: Store | None = field(default=None, repr=False)
    seconds: float = DEFAULT_SECONDS  # how long an exchange may take
    owns_group: bool = False  # join made the process group, so leave destroys it
    watcher: FailureWatcher | None = field(default=None, repr=False, compare=False)
    leaves_last: bool = False  # this process keeps the store open until all ranks have left

    @property
    def rank(self) -> int:
        """This worker's rank, or in a server its index among the servers."""
        return self.env.rank

    @property
    def size(self) -> int:
        """The number of workers, or in a server the number of servers."""
        return self.env.size

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and writes files."""
        return self.rank == 0 and self.env.role == "worker"

    def raise_if_failed(self) -> None:
        """Raise an error if this process knows of a failed rank, without asking the store."""
        if self.watcher is not None and self.watcher.failure is not None:
            raise self.watcher.failure.as_error()

    def missing_keys(self, store: Store, keys: Sequence[str], seconds: float) -> list[str]:
        """Wait until ``store`` has all keys. Return the keys still missing after ``seconds``.

        In a worker, the failure of another rank is raised. A server has no watcher to learn of it.
        """
        end = time.monotonic() + seconds
        while not store.check(list(keys)):
            if self.watcher is not None and (failure := self.watcher.fetch_failure()) is not None:
                raise failure.as_error()
            if time.monotonic() > end:
                return [key for key in keys if not store.check([key])]
            time.sleep(POLL_SECONDS)
        return []
