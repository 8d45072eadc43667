"""The store that workers meet at, hosted by the launcher so that no worker is special.

The socket is bound before anything starts: to loopback unless other hosts are to come, because
torch's own listens on every interface whatever it is told. torch is imported in a thread, while
the workers import it too.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

from shoal.errors import UsageError
from shoal.runtime.world.env import prefix
from shoal.runtime.world.failures import Failure

STORE_SECONDS = 30.0


def bind(
    port: int,
    *,
    everywhere: bool,
    name: str = "port ",
    instead: str = "choose another, or 0 for any",
) -> socket.socket:
    """A listening socket; port 0 takes any that is free.

    Args:
        port: where.
        everywhere: on all interfaces, or on loopback alone.
        name: what the user calls the port.
        instead: what to do when it is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("" if everywhere else "127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError(f"{name}{port} cannot be used: {error.strerror}; {instead}") from error
    return listener


class StoreHost:
    """A store in this process, ready soon after :meth:`start`."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._store: Any = None  # a TCPStore, once torch is there
        self._run_id = ""
        self._lock = threading.Lock()
        self._untold: list[tuple[Failure, tuple[str, str], int]] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="shoal-store", daemon=True)

    def start(self, run_id: str) -> None:
        """Begin to serve a run; those who connect before wait in the socket's queue.

        The run's name is written before anybody else could: no stranger may name it.
        """
        self._run_id = run_id
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
            for told in self._untold:
                self.tell(*told)
        except Exception as error:  # told by the main thread, whatever it is
            self.error = error

    def tell(self, failure: Failure, run: tuple[str, str], generation: int) -> None:
        """Say why a worker died on behalf of one that no longer can; as soon as one may."""
        with self._lock:
            if self._store is None:  # it died before torch was loaded here
                self._untold.append((failure, run, generation))
                return
        from torch._C._distributed_c10d import PrefixStore

        store = PrefixStore(f"{prefix(*run, generation)}/alarm", self._store)
        store.compare_set("failure", "", failure.write())
        store.set("bell", "1")

    def close(self) -> None:
        """Free the port."""
        self._store = None
        self._listener.close()
