"""Messages between hosts, over gloo; and what it means when gloo gives up.

gloo tells a connection, not a rank, and has one error for all: who has not come in time and who is
gone differ in its words only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor

from shoal.errors import ExchangeTimeout, PeerLost
from shoal.wire.shm.work import Work

_LATE = "Timed out"


@contextmanager
def named(what: str, whom: str) -> Iterator[None]:
    """Say of gloo's errors what was being done, and with whom.

    Raises:
        ExchangeTimeout: not done in time.
        PeerLost: the connection is broken.
    """
    try:
        yield
    except RuntimeError as error:
        kind = ExchangeTimeout if _LATE in str(error) else PeerLost
        raise kind(f"{what}: {whom}, between hosts: {error}") from error


class Letter(Work):
    """A message that gloo carries.

    Args:
        inner: gloo's own work.
        flat: the message.
        what: is done with it.
        whom: with.
        finally_: what to do when it is there.
    """

    def __init__(
        self,
        inner: Any,
        flat: Tensor,
        *,
        what: str,
        whom: str,
        finally_: Callable[[], None] | None = None,
    ) -> None:
        super().__init__([flat])
        self._inner, self._what, self._whom, self._finally = inner, what, whom, finally_

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent or received, and raise what went wrong."""
        if not self._done:  # gloo would wait for another one
            limit = (timeout,) if timeout else ()
            with named(self._what, self._whom):
                self._inner.wait(*limit)
            if self._finally is not None:
                self._finally()
            self.finish()
        return super().wait()

    def get_future(self) -> Any:
        """A torch future of the tensors, which are there: nobody else waits for them."""
        self.wait()
        return super().get_future()

    def is_completed(self) -> bool:
        """Whether it is known to be done; gloo tells only who waits."""
        return self._done or bool(self._inner.is_completed())

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    def source_rank(self) -> int:
        """Whom the message came from."""
        return self._source_rank()


class GlooPost:
    """Messages of a group on several hosts: all of them over gloo.

    Args:
        gloo: between all ranks.
        names: of the group's ranks.
    """

    def __init__(self, gloo: Any, names: Sequence[int]) -> None:
        self._gloo, self._names = gloo, names

    def send(self, flat: Tensor, peer: int, *, tag: int) -> Letter:
        """Begin to send a message."""
        what, whom = f"send (tag {tag})", f"rank {self._names[peer]}"
        with named(what, whom):
            return Letter(self._gloo.send([flat], peer, tag), flat, what=what, whom=whom)

    def receive(
        self, flat: Tensor, peer: int | None, *, tag: int, finally_: Callable[[], None]
    ) -> Letter:
        """Begin to receive a message into ``flat``."""
        whom = "any rank" if peer is None else f"rank {self._names[peer]}"
        what = f"receive (tag {tag})"
        with named(what, whom):
            if peer is None:
                inner = self._gloo.recv_anysource([flat], tag)
            else:
                inner = self._gloo.recv([flat], peer, tag)
        return Letter(inner, flat, what=what, whom=whom, finally_=finally_)

    def stop(self) -> None:
        """Nothing of its own to end."""
