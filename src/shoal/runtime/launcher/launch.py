"""Start workers on this machine, watch them, and leave nothing behind.

1. Everything that can be refused is refused before any process starts.
2. The store's socket is bound, then the workers are started, each in its own session.
3. The first death is told to the others; who does not follow within five seconds is stopped.
4. The first failing rank's traceback comes on top; with restarts left, a new generation begins.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shoal.errors import UsageError
from shoal.runtime.launcher.options import LaunchOptions, check, master
from shoal.runtime.launcher.output import Screen
from shoal.runtime.launcher.processes import Fleet, Guard, RunDirectory, Worker, asked
from shoal.runtime.launcher.report import (
    Death,
    describe,
    oom_kills,
    read_death,
    signal_name,
)
from shoal.runtime.launcher.store_host import StoreHost, bind
from shoal.runtime.world.env import TOKEN, fingerprint
from shoal.runtime.world.failures import Failure

__all__ = ["LaunchOptions", "launch", "torchrun_command"]

FOLLOW_SECONDS = 5.0
INTERRUPT_SECONDS = 0.4
TERMINATE_SECONDS = 5.0
STOP_SECONDS = 1.0
BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
NEVER_JOINED = 2
MARKS = ("joined-*", "error-*.json", "spans-*.jsonl")


def launch(command: Sequence[str], options: LaunchOptions) -> int:
    """Run ``command`` (a script and its arguments) on every worker; return the exit code.

    Raises:
        UsageError: refused, and nothing was started.
    """
    check(command, options)
    listener = None
    if options.meets and options.hosts_store:
        port = master(options)[1] if options.nodes > 1 else options.port
        listener = bind(port, everywhere=options.nodes > 1)
    host = StoreHost(listener) if listener else None
    try:
        with _place(options, host) as place:
            code = _Launch(command, options, place, host).run()
            if options.after is not None:
                options.after(place.directory)
            return code
    finally:
        if host is not None:
            host.close()


def torchrun_command(command: Sequence[str], options: LaunchOptions) -> str:
    """What one would type to start the same with torchrun."""
    words = ["torchrun"]
    if options.nodes > 1:
        address, port = master(options)
        words += [f"--nnodes={options.nodes}", f"--node-rank={options.node_rank}"]
        words += [f"--master-addr={address}", f"--master-port={port}"]
    else:
        words += ["--standalone"]
    words += [f"--nproc-per-node={options.workers}"]
    if options.max_restarts:
        words += [f"--max-restarts={options.max_restarts}"]
    before = [f"{name}={shlex.quote(value)}" for name, value in asked(options).items()]
    return " ".join([*before, *words, *map(shlex.quote, command)])


@contextmanager
def _place(options: LaunchOptions, host: StoreHost | None) -> Iterator[RunDirectory]:
    """A directory for this run, removed at the end unless the user named it."""
    kept = options.directory is not None
    if options.directory is not None:
        directory = options.directory.absolute()
    else:
        directory = Path(tempfile.mkdtemp(prefix="shoal-"))
    _prepare(directory)
    token = os.environ.get(TOKEN) or secrets.token_hex(16)
    run_id = fingerprint(token)[:8] if options.nodes > 1 else secrets.token_hex(4)
    address, port = "127.0.0.1", host.port if host else _free_port()
    if options.nodes > 1:
        address, port = master(options)
    try:
        yield RunDirectory(run_id, token, address, port, directory, kept)
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)


def _prepare(directory: Path) -> None:
    """Make it, without the marks of an earlier run."""
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        for stale in (path for glob in MARKS for path in directory.glob(glob)):
            stale.unlink()
    except OSError as error:
        raise UsageError(f"--dir {directory}: {error.strerror}; choose another") from error


def _free_port() -> int:
    # for a lone worker whose script makes a process group of its own
    with bind(0, everywhere=False) as listener:
        return int(listener.getsockname()[1])


class _Signals:
    """What the user or the system has asked of the launcher, kept for the loop to see."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _catch(self, number: int, _: FrameType | None) -> None:
        self.caught.append(number)


@dataclass
class _Launch:
    """One call of launch: its place, its screen, and what it has caught."""

    command: Sequence[str]
    options: LaunchOptions
    place: RunDirectory
    host: StoreHost | None

    def run(self) -> int:
        self.screen = Screen(self.options.output, self.place.directory / "logs")
        self.guard = Guard(None if self.place.kept else self.place.directory)
        self.oom_before = oom_kills()
        self.screen.say(f"the same with torchrun: {torchrun_command(self.command, self.options)}")
        try:
            with _Signals() as self.signals:
                return self._generations()
        finally:
            self.guard.dismiss()

    def _generations(self) -> int:
        for generation in range(self.options.max_restarts + 1):
            fleet = Fleet(self.screen, self.guard)
            try:
                fleet.start(self.command, self.options, self.place, generation)
                if self.host is not None and generation == 0:
                    self.host.start(self.place.run_id)
                code = self._watch(fleet, generation)
            finally:
                fleet.stop(signal.SIGTERM, STOP_SECONDS, lambda: False)
                self.screen.finish()
            left = self.options.max_restarts - generation
            if not self._again(code, left):
                break
            for mark in self.place.directory.glob("joined-*"):
                mark.unlink()
            self._back_off(generation, left)
            if self.signals.caught:
                return 128 + self.signals.caught[0]
        return code

    def _again(self, code: int, left: int) -> bool:
        # A usage error would only come back.
        return code not in (0, 2) and left > 0 and not self.signals.caught

    def _back_off(self, generation: int, left: int) -> None:
        seconds = BACKOFF_SECONDS[min(generation, len(BACKOFF_SECONDS) - 1)]
        self.screen.say(
            f"restarting all workers from the last checkpoint in {seconds:g} s "
            f"({left} restart{'s' if left > 1 else ''} left)"
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.signals.caught:
            time.sleep(0.05)

    def _watch(self, fleet: Fleet, generation: int) -> int:
        """Until all have ended, for whatever reason."""
        first_failure = done = None
        while fleet.alive:
            for worker in fleet.look():
                self._tell(worker, generation)
                if worker.failed:
                    first_failure = first_failure or worker.ended
            if self.signals.caught:
                return self._interrupted(fleet)
            if self.host is not None and self.host.error is not None:
                self.screen.say(f"the store could not be started: {self.host.error}")
                return 1
            if all(worker.code == 0 for worker in fleet.workers):
                done = done or time.monotonic()
            since = first_failure or done  # servers end after the last worker, or are ended
            if since is not None and time.monotonic() - since > FOLLOW_SECONDS:
                fleet.stop(signal.SIGTERM, STOP_SECONDS, lambda: bool(self.signals.caught))
        return self._conclude(fleet, failed=first_failure is not None)

    def _tell(self, worker: Worker, generation: int) -> None:
        """Tell the others why one is gone, when it could not do so itself."""
        silent = worker.code == 0 and not worker.joined
        if self.host is None or worker.rank < 0 or not (worker.failed or silent):
            return
        death = self._death(worker)
        kind, message = "died", death.how
        if silent:
            kind, message = "ended", "its script never called shoal.distribute"
        failure = Failure(worker.rank, kind, message, seconds=worker.ended)
        self.host.tell(failure, (self.place.run_id, self.place.token), generation)

    def _death(self, worker: Worker) -> Death:
        return read_death(worker, out_of_memory=oom_kills() > self.oom_before)

    def _interrupted(self, fleet: Fleet) -> int:
        number = self.signals.caught[0]
        seconds = INTERRUPT_SECONDS if number == signal.SIGINT else TERMINATE_SECONDS
        fleet.stop(number, seconds, lambda: len(self.signals.caught) > 1)
        self.screen.finish()
        self.screen.say(f"stopped by {signal_name(number)}")
        return 128 + number

    def _conclude(self, fleet: Fleet, *, failed: bool) -> int:
        self.screen.finish()
        if failed:
            deaths = [self._death(worker) for worker in fleet.members if worker.failed]
            first = min(deaths, key=lambda death: death.order)
            silent = self.options.output == "main"
            log = self.screen.log_of(first.worker.key) if silent else None
            self.screen.say(describe(deaths, log))
            return first.code
        if not any(worker.joined for worker in fleet.workers):
            self.screen.say(
                f"{self.command[0]} ended without calling shoal.distribute(model, optimizer, ...): "
                "if every worker did the same work on its own, add the call, or run it with "
                "python; if it makes a process group of its own, start it with torchrun"
            )
            return NEVER_JOINED
        return 0
