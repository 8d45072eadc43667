"""The interface of all wires, which answer the asks of algorithms.

An algorithm is a flow (:mod:`shoal.flow`), which is a generator that yields an ask, such as
``Mean(tensor)``, and is sent the answer. ``Wire.ask`` begins the communication and may return
before it is done. ``wait`` blocks until the answer is complete::

    flow                      runtime                          wire
    yield Mean(gradient)  ->  pending = wire.ask(ask)      ->  dist.all_reduce(..., async_op=True)
                              (backward goes on meanwhile)
    mean = <-             <-  flow.send(pending.wait())    <-  work.wait(), sum / size

Every rank must issue the same asks in the same order, because asks are matched by their order.

The wires are ``null`` (one worker), ``collective`` (a process group), ``queued`` (a process group
with send queues), ``neighbours`` (gossip), ``server`` (parameter servers) and, in the runtime,
``PairWire`` (AD-PSGD).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.flow import Ask, Gather, nbytes


class Pending(Protocol):
    """The answer to an ask, which may not be complete yet."""

    def wait(self) -> Any:
        """Block until the answer is complete, and return it."""


class Wire(Protocol):
    """Issues asks and returns their pending answers.

    Attributes:
        size: number of workers.
        blocks: if True, ``ask`` may wait for the network even for a ``Mean``, so overlap needs
            another thread.
    """

    size: int
    blocks: bool

    def ask(self, ask: Ask) -> Pending:
        """Begin the communication for an ask, and return its pending answer."""

    def leave(self) -> None:
        """Release what the wire holds, at the end of the run."""


class Ready(NamedTuple):
    """An answer that is already complete."""

    answer: Any

    def wait(self) -> Any:
        """Return the answer."""
        return self.answer


class PendingWork(NamedTuple):
    """An answer that ``finish`` computes when torch's works are complete.

    ``signals`` is False if the futures of the works do not report when they are complete, as for
    sends and receives.
    """

    works: tuple[dist.Work, ...]
    finish: Callable[[], Any]
    signals: bool = True

    def wait(self) -> Any:
        """Wait for each work, then return what ``finish`` returns."""
        for work in self.works:
            work.wait()
        return self.finish()


class PendingAll(NamedTuple):
    """The answers to several asks, in the order of the asks."""

    parts: tuple[Pending, ...]

    def wait(self) -> tuple[Any, ...]:
        """Wait for each answer, and return all of them."""
        return tuple(part.wait() for part in self.parts)


Parts = tuple[Tensor, ...]


class SpanRecorder(Protocol):
    """Records the spans of a timeline."""

    enabled: bool

    def add(
        self, lane: str, name: str, start: float, seconds: float, nbytes: int = 0, step: int = 0
    ) -> None:
        """Add a span. ``start`` is a time of ``time.perf_counter``."""


class TracedPending(NamedTuple):
    """A pending answer that calls ``arrived`` when it is complete."""

    pending: Pending
    arrived: Callable[[], None]

    def wait(self) -> Any:
        """Wait for the answer, call ``arrived``, and return the answer."""
        answer = self.pending.wait()
        self.arrived()
        return answer


class TracedWire:
    """A wire that records each exchange on the timeline, from the ask to its answer."""

    def __init__(self, wire: Wire, recorder: SpanRecorder) -> None:
        self.size, self.blocks, self.step = wire.size, wire.blocks, 0
        self.inner, self._recorder = wire, recorder

    def ask(self, ask: Ask) -> Pending:
        """Issue an ask. Its span ends when the work reports its end or ``wait`` gets the answer."""
        if not self._recorder.enabled:
            return self.inner.ask(ask)
        start, step, size = time.perf_counter(), self.step, nbytes(ask)
        record_once = [True]

        def arrived(*_: object) -> None:
            # Both the work's callback and wait() call this, maybe in two threads at once. pop() is
            # atomic, so exactly one of them records the span.
            try:
                record_once.pop()
            except IndexError:
                return
            seconds = time.perf_counter() - start
            self._recorder.add("exchange", type(ask).__name__, start, seconds, size, step)

        pending = self.inner.ask(ask)
        notifies(pending, arrived)
        return TracedPending(pending, arrived)

    def leave(self) -> None:
        """Release what the inner wire holds."""
        self.inner.leave()


def notifies(pending: Pending, arrived: Callable[..., None]) -> bool:
    """Have ``arrived`` called when the last work is done. Return False if this is impossible."""
    if not (isinstance(pending, PendingWork) and pending.works and pending.signals):
        return False
    pending.works[-1].get_future().add_done_callback(arrived)
    return True


# Newer torch calls this function all_gather_single, older torch all_gather_into_tensor.
gather_flat: Callable[..., dist.Work | None]
gather_flat = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
ALIGN = 16  # the bytes of the largest dtype, which is complex128


def pack(parts: Iterable[Tensor]) -> Tensor:
    """Return a buffer of bytes with copies of the tensors, each aligned for its dtype."""
    pieces = []
    for part in parts:
        raw = part.detach().contiguous().view(-1).view(torch.uint8)
        pieces.append(raw)
        if gap := -raw.numel() % ALIGN:
            pieces.append(raw.new_zeros(gap))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def unpack(buffer: Tensor, like: Iterable[Tensor]) -> Parts:
    """Return views of the tensors in a packed buffer, with the shapes and dtypes of ``like``."""
    parts, start = [], 0
    for tensor in like:
        nbytes = tensor.numel() * tensor.element_size()
        raw = buffer[start : start + nbytes]
        # torch refuses a view at a misaligned address, even if the view is empty
        part = raw.view(tensor.dtype) if nbytes else raw.new_empty(0, dtype=tensor.dtype)
        parts.append(part.view(tensor.shape))
        start += nbytes + (-nbytes % ALIGN)
    return tuple(parts)


def pack_all(messages: Iterable[Parts]) -> Tensor:
    """Pack several messages into one buffer."""
    return pack(part for parts in messages for part in parts)


def unpack_all(buffer: Tensor, like: Sequence[Parts]) -> list[Parts]:
    """Undo :func:`pack_all`. Return a tuple of views for each message of ``like``."""
    parts = unpack(buffer, (part for message in like for part in message))
    ends = accumulate(map(len, like), initial=0)
    return [parts[start:stop] for start, stop in pairwise(ends)]


def mean_of_messages(asks: Sequence[Gather], buffers: Iterable[tuple[Tensor, float]]) -> Any:
    """Return the weighted mean of a single ask, or the tuple of the means of several asks.

    ``buffers`` has a pair (packed messages of all asks, weight) for each worker.
    """
    means = [torch.zeros_like(ask.like) for ask in asks]
    like = [ask.parts for ask in asks]
    for buffer, weight in buffers:
        for ask, parts, mean in zip(asks, unpack_all(buffer, like), means, strict=True):
            ask.add(parts, mean, weight)
    return means[0] if len(means) == 1 else tuple(means)
