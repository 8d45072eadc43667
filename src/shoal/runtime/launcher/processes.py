"""Start, watch and stop the processes of one generation of a run.

Each worker or server has its own session, so that the processes it starts can be ended with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal.cores import usable_cores
from shoal.runtime.launcher import guard
from shoal.runtime.launcher.options import LaunchOptions
from shoal.runtime.launcher.output import OutputRouter
from shoal.runtime.world import env as names
from shoal.runtime.world.interfaces import IFNAME_VARIABLE, loopback_name

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.05
GROUP_POLL_SECONDS = 0.02
KILL_SECONDS = 5.0
DISMISS_SECONDS = 5.0


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, its identity, and the address of its store."""

    run_id: str
    token: str = field(repr=False)
    host: str
    port: int
    directory: Path
    temporary: bool  # the launcher made the directory and removes it


def process_environment(
    options: LaunchOptions, run: RunDirectory, generation: int, own: dict[str, str]
) -> dict[str, str]:
    """Return the variables to set for one process, including ``own``, which only it has."""
    key = own.get("RANK", f"server-{own.get(names.SERVER)}")
    env = {
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_WORLD_SIZE": str(options.workers),
        "GROUP_RANK": str(options.node_rank),
        "GROUP_WORLD_SIZE": str(options.nodes),
        "MASTER_ADDR": run.host,
        "MASTER_PORT": str(run.port),
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": run.run_id,
        "PYTHONUNBUFFERED": "1",
        names.AGENT_STORE: str(options.needs_store),
        names.RUN_ID: run.run_id,
        names.TOKEN: run.token,
        names.GENERATION: str(generation),
        names.DIRECTORY: str(run.directory),
        names.SERVERS: str(options.servers),
        names.ERROR_FILE: str(run.directory / f"error-{key}.{generation}.json"),
    }
    resume = {names.RESUME: "1"} if generation > 0 else {}
    return env | option_environment(options) | resume | own


def option_environment(options: LaunchOptions) -> dict[str, str]:
    """Return the environment variables that pass the user's options to the script."""
    variables = {
        names.STRATEGY: options.strategy,
        names.BACKEND: options.backend,
        names.RESUME: "1" if options.resume else None,
        names.CHECKPOINT: str(options.checkpoint.absolute()) if options.checkpoint else None,
        names.TIMEOUT: str(options.timeout_seconds) if options.timeout_seconds else None,
    }
    return {name: value for name, value in variables.items() if value is not None}


def default_environment(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return defaults for the environment variables that are unset or empty in ``environ``."""
    threads = max(1, usable_cores() // (options.workers + options.servers))
    variables = {"OMP_NUM_THREADS": str(threads), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    loopback = loopback_name()
    if options.nodes == 1 and loopback is not None:
        variables[IFNAME_VARIABLE] = loopback  # works whatever the host name resolves to
    return {name: value for name, value in variables.items() if not environ.get(name)}


def spawn(
    command: Sequence[str], env: Mapping[str, str], streams: tuple[int | None, int | None]
) -> subprocess.Popen[bytes]:
    """Start a Python process in its own session. Linux kills it if this process dies."""
    return subprocess.Popen(
        [sys.executable, *command],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


def die_with_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that lets Linux kill the child after its parent. Elsewhere, None."""
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def request_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return request_signal


@dataclass
class Worker:
    """One started worker or server."""

    name: str  # in messages, such as "rank 1"
    key: str  # in file names, such as "rank-1"
    rank: int  # -1 for a server
    process: subprocess.Popen[bytes]
    error_file: Path
    joined_file: Path
    code: int | None = None  # exit code, -n after signal n, or None while it runs
    ended: float = 0.0  # when it ended, on the monotonic clock
    stopped: bool = False  # the launcher has sent it a signal to end

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.code is not None and self.code != 0

    @property
    def joined(self) -> bool:
        """Whether its script has called distribute."""
        return self.joined_file.exists()

    def reap(self) -> bool:
        """Collect the exit code if the process has ended. Return whether this call did so.

        First it ends the rest of the process group, while the kernel cannot reuse the group's id.
        """
        if self.code is not None:
            return False
        pid = self.process.pid
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        clear_group(pid)
        self.code, self.ended = self.process.wait(), time.monotonic()
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the group of this process, unless :meth:`reap` has its exit code."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def clear_group(group: int) -> None:
    """End a dead worker's children by SIGTERM, so they free shared memory, and later SIGKILL."""
    if not has_live_members(group):
        return
    for number, seconds in ((signal.SIGTERM, 0.3), (signal.SIGKILL, 0.3)):
        end = time.monotonic() + seconds
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        while time.monotonic() < end:
            if not has_live_members(group):
                return
            time.sleep(GROUP_POLL_SECONDS)


def has_live_members(group: int) -> bool:
    """Whether a process other than the leader runs in a group. Without /proc, return False."""
    if not Path("/proc/self/stat").exists():
        return False
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != group:
            with suppress(OSError, IndexError, ValueError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] != "Z":
                    return True
    return False


class GuardProcess:
    """Starts the guard, which kills the workers and removes ``temporary`` if this process dies."""

    def __init__(self, temporary: Path | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        if temporary is not None:
            self.send(f"d {temporary}")

    def send(self, line: str) -> None:
        """Send one line of the protocol in :mod:`shoal.runtime.launcher.guard`."""
        with suppress(BrokenPipeError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def dismiss(self) -> None:
        """End the guard process, which then cleans up nothing."""
        self.send("bye")
        with suppress(BrokenPipeError):
            try:
                self._process.communicate(timeout=DISMISS_SECONDS)
            except subprocess.TimeoutExpired:  # the guard is suspended, or the machine is busy
                self._process.kill()
                self._process.communicate()


class Processes:
    """The workers and servers of one generation, that is of one start of all workers."""

    def __init__(self, output: OutputRouter, guard: GuardProcess) -> None:
        self.all: list[Worker] = []
        self._output, self._guard = output, guard

    def start(
        self, command: Sequence[str], options: LaunchOptions, run: RunDirectory, generation: int
    ) -> None:
        """Start the servers and the workers of this machine."""
        base = dict(os.environ)
        base |= default_environment(options, base)
        for index in range(options.servers):
            own = {names.ROLE: "server", names.SERVER: str(index)}
            env = base | process_environment(options, run, generation, own)
            for name in names.RANKS:
                env.pop(name, None)
            self._start(command, env, f"server-{index}", f"server-{index}")
        for index in range(options.workers):
            rank = str(options.node_rank * options.workers + index)
            own = {"RANK": rank, "LOCAL_RANK": str(index), "ROLE_RANK": rank, names.ROLE: "worker"}
            own |= {"ROLE_NAME": "default", "ROLE_WORLD_SIZE": str(options.world_size)}
            env = base | process_environment(options, run, generation, own)
            self._start(command, env, f"rank-{rank}", rank)

    def _start(self, command: Sequence[str], env: dict[str, str], key: str, suffix: str) -> None:
        rank = int(env.get("RANK", -1))
        out, err, open_files = self._output.streams(key, is_main=rank == 0)
        try:
            process = spawn(command, env, (out, err))
        finally:
            for fd in open_files:
                os.close(fd)
        self._guard.send(f"+{process.pid}")
        error_file = Path(env[names.ERROR_FILE])
        joined_file = Path(env[names.DIRECTORY], f"joined-{suffix}")
        worker = Worker(key.replace("-", " "), key, rank, process, error_file, joined_file)
        self.all.append(worker)
        self._output.attach(process, worker.name, len(self.all) - 1)

    @property
    def alive(self) -> list[Worker]:
        """The workers and servers that still run."""
        return [worker for worker in self.all if worker.code is None]

    @property
    def workers(self) -> list[Worker]:
        """The workers, without servers."""
        return [worker for worker in self.all if worker.rank >= 0]

    def poll(self, seconds: float = POLL_SECONDS) -> list[Worker]:
        """Forward output for at most ``seconds``. Return the processes that have newly ended."""
        self._output.forward(seconds)
        ended = [worker for worker in self.alive if worker.reap()]
        for worker in ended:
            self._guard.send(f"-{worker.process.pid}")
        return ended

    def stop(self, number: int, grace_seconds: float, hurry: Callable[[], bool]) -> None:
        """Send a signal to all. Kill them after ``grace_seconds``, or once ``hurry()`` is true."""
        for worker in self.alive:
            worker.stopped = True
            worker.signal(number)
            worker.signal(signal.SIGCONT)  # a suspended process handles no other signal
        self._await_end(grace_seconds, hurry)
        for worker in self.alive:
            worker.signal(signal.SIGKILL)
        self._await_end(KILL_SECONDS, lambda: False)

    def _await_end(self, seconds: float, hurry: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while self.alive and time.monotonic() < end and not hurry():
            self.poll(POLL_SECONDS / 2)
