"""Replace network errors by errors that name the failed rank, and publish why a rank ends.

torch raises "connection closed by peer" or "timed out". :class:`ErrorContext` asks the store which
rank failed, or which ranks do not answer, and raises an error that names them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from shoal.errors import CheckpointError, ExchangeTimeout, PeerLost, ShoalError
from shoal.runtime.world import failures
from shoal.runtime.world.env import ERROR_FILE
from shoal.runtime.world.failures import POSITION, Failure, RankPosition
from shoal.runtime.world.world import World

LINGER_SECONDS = 0.6
LOST = ("connection", "by peer", "broken pipe", "socket", "gloo", "nccl")  # in torch's messages
LATE = ("timed out", "timeout")


class ErrorContext:
    """``with ErrorContext(world, step, "update"): ...`` replaces network errors in its block."""

    __slots__ = ("_exchange", "_step", "_world")

    def __init__(self, world: World, step: int, exchange: str) -> None:
        self._world, self._step, self._exchange = world, step, exchange

    def __enter__(self) -> None:
        POSITION.step, POSITION.exchange = self._step, self._exchange

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            better = explain(self._world, error)
            if better is not error:
                raise better from error
        POSITION.exchange = ""  # this rank is no longer in an exchange


def explain(world: World, error: Exception) -> Exception:
    """Return an error that says more than ``error``, from what the other ranks wrote to the store.

    Use it as ``raise explain(world, error) from error``. An error that is not about another rank
    is returned unchanged. Waits about a second at most.
    """
    # Ranks write a checkpoint together, so its error may be caused by an error of an exchange.
    cause = error.__cause__ if isinstance(error, CheckpointError) else error
    if world.watcher is None or cause is None or not _is_about_peers(cause):
        return error
    try:
        positions = world.watcher.collect_positions()
        failure = world.watcher.fetch_failure()
    except RuntimeError:  # torch's, from the store
        return PeerLost(f"the store's host has probably ended, while this rank was {POSITION}")
    if failure is not None and failure.rank != world.rank:
        better = failure.as_error()
        return error if str(better) == str(error) else better
    if isinstance(cause, PeerLost):
        return PeerLost(f"{cause}, while this rank was {POSITION}")
    late = isinstance(cause, ExchangeTimeout) or any(word in str(cause).lower() for word in LATE)
    blame = _blame(world, positions, late=late)
    return ExchangeTimeout(f"{blame} ({cause})") if isinstance(cause, ExchangeTimeout) else blame


def _is_about_peers(error: BaseException) -> bool:
    """Whether an error is about a late or lost rank, and its message does not name the step."""
    if isinstance(error, ShoalError):
        return isinstance(error, (PeerLost, ExchangeTimeout)) and " of step " not in str(error)
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in (*LATE, *LOST))


def _blame(world: World, positions: dict[int, RankPosition], *, late: bool) -> ShoalError:
    """Return an error that names the ranks that did not answer or are at another position."""
    silent = [rank for rank in range(world.size) if rank not in positions]
    elsewhere = sorted(rank for rank, position in positions.items() if position != POSITION)
    where = [f"rank {rank} is {positions[rank]}" for rank in elsewhere]
    if not late:
        who = f"{_ranks(silent)} gone" if silent else "a connection broke, but all ranks still run"
        return PeerLost("; ".join([f"{who}, while this rank was {POSITION}", *where]))
    missing = silent or elsewhere
    who = f"{_ranks(missing)} missing" if missing else "every rank is in this exchange"
    why = " (no answer: suspended, dead or unreachable)" if silent else ""
    what = f"exchange {POSITION.exchange!r} of step {POSITION.step}"
    head = f"{what} did not end within {world.seconds:g} s: {who}{why}"
    return ExchangeTimeout("; ".join([head, *where]))


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"


def report_failure(world: World | None, error: BaseException) -> bool:
    """Write why this rank ends, for the other ranks and for the launcher.

    Returns whether the launcher will show the reason. ``world`` is None before joining.
    """
    rank = world.rank if world is not None else int(os.environ.get("RANK", "0"))
    failure = Failure.of(rank, error)
    shown = failures.write_error_file(failure)
    if world is not None and world.watcher is not None:
        with suppress(RuntimeError):  # torch raises it when the host of the store has ended
            world.watcher.publish(failure)
    return shown


def install_excepthook(current: Callable[[], World | None]) -> None:
    """Set a ``sys.excepthook`` that reports an uncaught exception to other ranks and the launcher.

    ``current`` returns the world of this process, or None if it has not joined one. A
    KeyboardInterrupt is not reported.
    """
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours, world = os.getpid() == pid, current()  # a forked child reports nothing
        interrupted = issubclass(kind, KeyboardInterrupt)
        shown = interrupted and bool(os.environ.get(ERROR_FILE))
        if ours and not interrupted:
            shown = report_failure(world, error)
        if not (ours and shown):  # if shown, the launcher says why the run ended
            before(kind, error, trace)
        if ours and world is not None and world.store is not None and world.env.hosts_store:
            time.sleep(LINGER_SECONDS)  # the other ranks read the reason meanwhile

    sys.excepthook = hook
