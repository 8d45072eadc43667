"""The store at which the workers meet, hosted by the launcher so that no worker is special.

The socket is bound before any worker starts. torch is imported in a thread, while the workers
import it, too.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

from shoal.runtime.world.env import prefix
from shoal.runtime.world.failures import FAILURE_KEY, NOTIFY_KEY, STORE_PREFIX, Failure

STORE_SECONDS = 30.0


class StoreHost:
    """A TCPStore in this process, ready soon after :meth:`start`."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.error: Exception | None = None  # why the store could not be started
        self._listener = listener
        self._store: Any = None  # a TCPStore, once torch is imported
        self._run_id = self._token = ""
        self._lock = threading.Lock()
        self._pending: list[tuple[Failure, int]] = []  # failures before the store was ready
        self._thread = threading.Thread(target=self._serve, name="shoal-store", daemon=True)

    def start(self, run_id: str, token: str) -> None:
        """Start to serve a run; earlier connections wait in the socket's queue.

        The store's first key is the run's id, so that no other process can set it.
        """
        self._run_id, self._token = run_id, token
        self._thread.start()

    def _serve(self) -> None:
        try:
            from torch._C._distributed_c10d import TCPStore

            store = TCPStore(
                "127.0.0.1", self.port, None, True, timeout=timedelta(seconds=STORE_SECONDS),
                wait_for_workers=False, master_listen_fd=self._listener.detach(),
            )  # fmt: skip
            store.set("shoal/run", self._run_id)
            with self._lock:
                self._store = store
            for failure, generation in self._pending:
                self.publish(failure, generation)
        except Exception as error:  # the main thread reports it
            self.error = error

    def publish(self, failure: Failure, generation: int) -> None:
        """Tell the other workers why one died, on its behalf; once the store is ready."""
        with self._lock:
            if self._store is None:
                self._pending.append((failure, generation))
                return
        from torch._C._distributed_c10d import PrefixStore

        base = f"{prefix(self._run_id, self._token, generation)}/{STORE_PREFIX}"
        store = PrefixStore(base, self._store)
        store.compare_set(FAILURE_KEY, "", failure.write())
        store.set(NOTIFY_KEY, "1")

    def close(self) -> None:
        """Free the port."""
        self._store = None
        self._listener.close()
