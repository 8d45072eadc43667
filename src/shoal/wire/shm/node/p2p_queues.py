"""One message between two ranks, while it is being sent or received."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta

from torch import Tensor

from shoal.errors import ExchangeTimeout, LayoutMismatch
from shoal.wire.shm.work import Work


class Parcel(Work):
    """A message under way.

    Args:
        flat: its numbers, contiguous.
        tag: must match.
        peer: the other rank, or None for any.
        end: when it must have arrived, on the monotonic clock.
        drive: called by who waits for the message, with the latest time; returns when it has
            arrived, or then.
    """

    def __init__(
        self,
        flat: Tensor,
        tag: int,
        *,
        peer: int | None,
        end: float,
        drive: Callable[[Parcel, float], None] | None = None,
    ) -> None:
        super().__init__([flat])
        self.flat, self.tag, self.peer, self._drive = flat, tag, peer, drive
        self.address, self.nbytes, self.start = flat.data_ptr(), flat.nbytes, 0
        self.end, self.finally_ = end, None
        self.from_anyone = peer is None

    finally_: Callable[[], None] | None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent or received, and raise what went wrong.

        Raises:
            ExchangeTimeout: not done within ``timeout``; it goes on.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done and self._drive is not None:
            self._drive(self, time.monotonic() + seconds if seconds > 0 else math.inf)
            if not self._done:
                raise ExchangeTimeout(f"a message (tag {self.tag}) not done within {seconds:g} s")
        return super().wait()

    def _source_rank(self) -> int:
        return -1 if self.peer is None else self.peer

    def source_rank(self) -> int:
        """Whom the message came from."""
        return self._source_rank()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done; put the message into a tensor that was not contiguous."""
        if error is None and self.finally_ is not None:
            self.finally_()
        super().finish(error)

    def misfit(self, nbytes: int) -> LayoutMismatch | None:
        """What is wrong if ``nbytes`` were sent; None if that is what is wanted."""
        if nbytes == self.nbytes:
            return None
        return LayoutMismatch(
            f"receive (tag {self.tag}): rank {self.peer} sent {nbytes} bytes, "
            f"but the tensor here has {self.nbytes}; both ends need the same size and type"
        )
