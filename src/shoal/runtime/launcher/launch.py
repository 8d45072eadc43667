"""Start workers on this machine, watch them, and leave nothing behind.

1. Check the script and the options. An error is raised before any process starts.
2. On the first machine, bind the socket of the store, unless there is only one process. Start the
   workers and servers, each in its own session.
3. When a worker fails, the launcher that hosts the store writes the reason there for the other
   workers. Each launcher stops what still runs five seconds after its first failure.
4. Report the first failure with its traceback. If restarts are left, start a new generation.
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
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from shoal.errors import UsageError
from shoal.runtime.launcher.options import LaunchOptions, check, master
from shoal.runtime.launcher.output import OutputRouter
from shoal.runtime.launcher.processes import (
    GuardProcess,
    Processes,
    RunDirectory,
    Worker,
    option_environment,
)
from shoal.runtime.launcher.report import WorkerExit, describe, oom_kills, signal_name
from shoal.runtime.launcher.store_host import StoreHost
from shoal.runtime.world.env import TOKEN, fingerprint
from shoal.runtime.world.failures import Failure
from shoal.runtime.world.interfaces import bind

__all__ = ["LaunchOptions", "launch", "torchrun_command"]

FOLLOW_SECONDS = 5.0  # from the first failure, or the end of all workers, to SIGTERM
INTERRUPT_SECONDS = 0.4  # from a forwarded SIGINT to SIGKILL
TERMINATE_SECONDS = 5.0  # from a forwarded SIGTERM or SIGHUP to SIGKILL
STOP_SECONDS = 1.0  # from the launcher's own SIGTERM to SIGKILL
BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
NEVER_JOINED = 2  # exit code if no worker called shoal.distribute
RUN_FILES = ("joined-*", "error-*.json", "spans-*.jsonl")


def launch(command: Sequence[str], options: LaunchOptions) -> int:
    """Run ``command`` (script and arguments) in this machine's workers, and return the exit code.

    Raises:
        UsageError: the options are wrong. Nothing was started.
    """
    check(command, options)
    host = None
    if options.needs_store and options.node_rank == 0:
        port = master(options)[1] if options.nodes > 1 else options.port
        host = StoreHost(bind(port, everywhere=options.nodes > 1))
    with closing(host) if host else nullcontext(), _run_directory(options, host) as run:
        code = _Launcher(list(command), options, run, host).supervise()
        if options.after is not None:
            options.after(run.directory)
        return code


def torchrun_command(command: Sequence[str], options: LaunchOptions) -> str:
    """Return the torchrun command line that starts the same workers."""
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
    variables = [f"{name}={shlex.quote(v)}" for name, v in option_environment(options).items()]
    return " ".join([*variables, *words, *map(shlex.quote, command)])


@contextmanager
def _run_directory(options: LaunchOptions, host: StoreHost | None) -> Iterator[RunDirectory]:
    """Make the directory of this run. Remove it at the end unless the user gave --dir."""
    temporary = options.directory is None
    directory = (options.directory or Path(tempfile.mkdtemp(prefix="shoal-"))).absolute()
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        for stale in (path for glob in RUN_FILES for path in directory.glob(glob)):
            stale.unlink()  # left by an earlier run
    except OSError as error:
        raise UsageError(f"--dir {directory}: {error.strerror}; choose another") from error
    token = os.environ.get(TOKEN) or secrets.token_hex(16)
    run_id = fingerprint(token)[:8] if options.nodes > 1 else secrets.token_hex(4)
    local = "127.0.0.1", host.port if host else _free_port()
    address, port = master(options) if options.nodes > 1 else local
    try:
        yield RunDirectory(run_id, token, address, port, directory, temporary)
    finally:
        if temporary:
            shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    # A single worker has no store here, but its script may make its own process group.
    with bind(0, everywhere=False) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _recorded_signals(received: list[int]) -> Iterator[None]:
    """Append SIGINT, SIGTERM and SIGHUP to ``received``, but only in the main thread."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Launcher:
    """Runs all generations of one :func:`launch`. Each restart begins a new generation."""

    def __init__(
        self, command: list[str], options: LaunchOptions, run: RunDirectory, host: StoreHost | None
    ) -> None:
        self.command, self.options, self.run, self.host = command, options, run, host
        self.output = OutputRouter(options.output, run.directory / "logs")
        self.guard = GuardProcess(run.directory if run.temporary else None)
        self.signals: list[int] = []
        self.oom_before = oom_kills()

    def supervise(self) -> int:
        """Start a generation, and restart after failures if allowed. Return the exit code."""
        command = torchrun_command(self.command, self.options)
        self.output.message(f"the equivalent torchrun command: {command}")
        try:
            with _recorded_signals(self.signals):
                return self._generations()
        finally:
            self.guard.dismiss()

    def _generations(self) -> int:
        for generation in range(self.options.max_restarts + 1):
            processes = Processes(self.output, self.guard)
            try:
                processes.start(self.command, self.options, self.run, generation)
                if self.host is not None and generation == 0:
                    self.host.start(self.run.run_id, self.run.token)
                code = self._watch(processes, generation)
            finally:
                processes.stop(signal.SIGTERM, STOP_SECONDS, lambda: False)
                self.output.drain()
            restarts = self.options.max_restarts - generation
            # After a usage error (exit code 2) a restart would only fail again.
            if code in (0, 2) or restarts == 0 or self.signals:
                break
            for file in self.run.directory.glob("joined-*"):
                file.unlink()
            self._back_off(generation, restarts)
            if self.signals:
                return 128 + self.signals[0]
        return code

    def _back_off(self, generation: int, restarts: int) -> None:
        seconds = BACKOFF_SECONDS[min(generation, len(BACKOFF_SECONDS) - 1)]
        self.output.message(
            f"restarting all workers from the last checkpoint in {seconds:g} s "
            f"(restart {generation + 1} of {generation + restarts})"
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.signals:
            time.sleep(0.05)

    def _watch(self, processes: Processes, generation: int) -> int:
        """Return the exit code once all have ended, a signal arrives or the store fails."""
        failed_at = done_at = None
        while processes.alive:
            for worker in processes.poll():
                self._publish_failure(worker, generation)
                if worker.failed:
                    failed_at = failed_at or worker.ended
            if self.signals:
                return self._interrupt(processes)
            if self.host is not None and self.host.error is not None:
                self.output.message(f"the store could not be started: {self.host.error}")
                return 1
            if all(worker.code == 0 for worker in processes.workers):
                done_at = done_at or time.monotonic()
            since = failed_at or done_at  # after done_at only servers can still run
            if since is not None and time.monotonic() - since > FOLLOW_SECONDS:
                processes.stop(signal.SIGTERM, STOP_SECONDS, lambda: bool(self.signals))
        return self._conclude(processes, failed=failed_at is not None)

    def _publish_failure(self, worker: Worker, generation: int) -> None:
        """Write that a worker failed or never joined, unless the store already has a failure."""
        never_joined = worker.code == 0 and not worker.joined
        if self.host is None or worker.rank < 0 or not (worker.failed or never_joined):
            return
        kind, message = "died", self._read_exit(worker).reason
        if never_joined:
            kind, message = "ended", "its script never called shoal.distribute"
        self.host.publish(Failure(worker.rank, kind, message, seconds=worker.ended), generation)

    def _read_exit(self, worker: Worker) -> WorkerExit:
        return WorkerExit.read(worker, out_of_memory=oom_kills() > self.oom_before)

    def _interrupt(self, processes: Processes) -> int:
        """Send the received signal to all processes. A second signal kills them at once."""
        number = self.signals[0]
        seconds = INTERRUPT_SECONDS if number == signal.SIGINT else TERMINATE_SECONDS
        processes.stop(number, seconds, lambda: len(self.signals) > 1)
        self.output.drain()
        self.output.message(f"stopped by {signal_name(number)}")
        return 128 + number

    def _conclude(self, processes: Processes, *, failed: bool) -> int:
        """Report how the generation ended, and return the exit code."""
        self.output.drain()
        if failed:
            exits = [self._read_exit(worker) for worker in processes.all if worker.failed]
            first = min(exits, key=lambda ended: ended.order)
            has_log = self.options.output == "main"
            log = self.output.log_file(first.worker.key) if has_log else None
            self.output.message(describe(exits, log))
            return first.code
        if not any(worker.joined for worker in processes.workers):
            self.output.message(
                f"{self.command[0]} ended without calling shoal.distribute(model, optimizer, ...), "
                "so each worker ran alone; add the call, or start the script with python, or with "
                "torchrun if it makes its own process group"
            )
            return NEVER_JOINED
        return 0
