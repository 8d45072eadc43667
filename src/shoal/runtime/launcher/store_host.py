"""Host the TCPStore of a run in the launcher, so that the store survives the end of any worker.

The socket listens before any worker starts. A thread imports torch and starts the store, while the
workers import torch, too.
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
    """Serves a TCPStore on ``listener``, in a thread that :meth:`start` starts."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.error: Exception | None = None  # why the store could not be started
        self._listener = listener
        self._store: Any = None  # a TCPStore, once torch is imported
        self._run_id = self._token = ""
        self._lock = threading.Lock()
        self._pending: list[tuple[Failure, int]] = []  # failures to write once the store is ready
        self._thread = threading.Thread(target=self._serve, name="shoal-store", daemon=True)

    def start(self, run_id: str, token: str) -> None:
        """Start the thread of the store. Until the store is ready, connections wait in a queue.

        The thread writes ``run_id`` to the store, so that processes of other runs are refused.
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
        except Exception as error:  # the main thread reports the error
            self.error = error

    def publish(self, failure: Failure, generation: int) -> None:
        """Write a failure once the store is ready, unless its generation already has one."""
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
        """Drop the store and close the socket, which frees the port."""
        self._store = None
        self._listener.close()
