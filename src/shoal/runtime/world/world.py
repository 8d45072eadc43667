"""One rank's view of its run: its environment, and what joining the other ranks added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import Store

from shoal.runtime.world.env import RankEnv
from shoal.runtime.world.failures import FailureWatcher

DEFAULT_SECONDS = 300.0


@dataclass(frozen=True)
class World:
    """One rank's view of its run, made by :func:`shoal.runtime.world.join.join`.

    ``store`` and ``watcher`` are None without other processes; servers have no watcher.
    """

    env: RankEnv
    device: torch.device
    backend: str  # "none" where there is no process group
    store: Store | None = field(default=None, repr=False)
    seconds: float = DEFAULT_SECONDS  # how long an exchange may take
    owns_group: bool = False  # join made the process group, so leave destroys it
    watcher: FailureWatcher | None = field(default=None, repr=False, compare=False)
    close: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def rank(self) -> int:
        """This worker's rank; of a server, its index among the servers."""
        return self.env.rank

    @property
    def size(self) -> int:
        """The number of workers; in a server, of servers."""
        return self.env.size

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this machine."""
        return self.env.local_rank

    @property
    def local_size(self) -> int:
        """The number of workers on this machine."""
        return self.env.local_size

    @property
    def generation(self) -> int:
        """How often the run was restarted."""
        return self.env.generation

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self.env.run_id

    @property
    def token(self) -> str:
        """The secret that all processes of the run share."""
        return self.env.token

    @property
    def role(self) -> str:
        """``worker`` or ``server``."""
        return self.env.role

    @property
    def workers(self) -> int:
        """The number of workers, also in a server."""
        return self.env.workers

    @property
    def servers(self) -> int:
        """The number of servers that the launcher started."""
        return self.env.servers

    @property
    def hosts_store(self) -> bool:
        """Whether this process hosts the store."""
        return self.store is not None and self.env.hosts_store

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and writes files."""
        return self.rank == 0 and self.role == "worker"

    def raise_if_failed(self) -> None:
        """Raise if another rank is known to have failed; sends no message."""
        if self.watcher is not None and self.watcher.failure is not None:
            raise self.watcher.failure.as_error()
