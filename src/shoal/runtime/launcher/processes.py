"""Worker processes: each in a session of its own, so that what it started dies with it.

All processes of one generation: started together, watched together, stopped together.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal.cores import usable_cores
from shoal.runtime.launcher import guard
from shoal.runtime.launcher.options import LaunchOptions
from shoal.runtime.launcher.output import Screen
from shoal.runtime.world import env as contract
from shoal.runtime.world.interfaces import IFNAME, loopback_name

PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class RunDirectory:
    """Where the workers of one run meet and leave their files."""

    run_id: str
    token: str = field(repr=False)
    host: str
    port: int
    directory: Path
    kept: bool


@dataclass
class Worker:
    """One started process."""

    name: str
    key: str
    rank: int  # -1 for a server
    process: subprocess.Popen[bytes]
    error_file: Path
    joined_file: Path
    code: int | None = None
    ended: float = 0.0
    stopped: bool = False  # by the launcher, so its end explains nothing

    @property
    def failed(self) -> bool:
        """Whether it has ended badly."""
        return self.code is not None and self.code != 0

    @property
    def joined(self) -> bool:
        """Whether its script has called distribute."""
        return self.joined_file.exists()

    def reap(self) -> bool:
        """Whether it has ended just now; its process group is cleared before its id is free."""
        if self.code is not None:
            return False
        pid = self.process.pid
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        clear_group(pid)
        self.code = self.process.wait()
        self.ended = time.monotonic()
        return True

    def signal(self, number: int) -> None:
        """Send to the worker and to all it has started."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def clear_group(group: int) -> None:
    """End what a worker left behind; a resource tracker has a moment to free shared memory."""
    if not _others(group):
        return
    for number, seconds in ((signal.SIGTERM, 0.3), (signal.SIGKILL, 0.3)):
        end = time.monotonic() + seconds
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        while time.monotonic() < end:
            if not _others(group):
                return
            time.sleep(LOOK_SECONDS)


def _others(group: int) -> bool:
    """Whether a group has a live member besides its ended leader."""
    if not Path("/proc/self/stat").exists():
        return False
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != group:
            with suppress(OSError, IndexError, ValueError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] != "Z":
                    return True
    return False


def worker_environment(
    options: LaunchOptions, place: RunDirectory, *, index: int, generation: int
) -> dict[str, str]:
    """What a worker is told: torchrun's variables, then ours."""
    rank = options.node_rank * options.workers + index
    return {
        **_shared_environment(options, place, generation),
        "RANK": str(rank),
        "LOCAL_RANK": str(index),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(options.world_size),
        contract.ROLE: "worker",
        contract.ERROR_FILE: str(_error_file(place, str(rank), generation)),
    }


def server_environment(
    options: LaunchOptions, place: RunDirectory, *, index: int, generation: int
) -> dict[str, str]:
    """What a parameter server is told; it has no rank."""
    return {
        **_shared_environment(options, place, generation),
        contract.ROLE: "server",
        contract.SERVER: str(index),
        contract.ERROR_FILE: str(_error_file(place, f"server-{index}", generation)),
    }


def _error_file(place: RunDirectory, key: str, generation: int) -> Path:
    return place.directory / f"error-{key}.{generation}.json"


def _shared_environment(
    options: LaunchOptions, place: RunDirectory, generation: int
) -> dict[str, str]:
    env = {
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_WORLD_SIZE": str(options.workers),
        "GROUP_RANK": str(options.node_rank),
        "GROUP_WORLD_SIZE": str(options.nodes),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        contract.AGENT_STORE: str(options.meets),
        contract.RUN_ID: place.run_id,
        contract.TOKEN: place.token,
        contract.GENERATION: str(generation),
        contract.DIRECTORY: str(place.directory),
        contract.SERVERS: str(options.servers),
        "PYTHONUNBUFFERED": "1",
    }
    resumed = {contract.RESUME: "1"} if generation > 0 else {}
    return env | asked(options) | resumed


def asked(options: LaunchOptions) -> dict[str, str]:
    """What the user asked of the script, whoever starts it."""
    ours = {
        contract.STRATEGY: options.strategy,
        contract.BACKEND: options.backend,
        contract.RESUME: "1" if options.resume else None,
        contract.CHECKPOINT: str(options.checkpoint.absolute()) if options.checkpoint else None,
        contract.TIMEOUT: str(options.timeout_seconds) if options.timeout_seconds else None,
    }
    return {name: value for name, value in ours.items() if value is not None}


def defaults(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """What is set only where the user has not."""
    threads = max(1, usable_cores() // (options.workers + options.servers))
    wanted = {"OMP_NUM_THREADS": str(threads), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    lo = loopback_name()
    if options.nodes == 1 and lo is not None:
        wanted[IFNAME] = lo  # whatever this machine's name resolves to
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def spawn(
    command: Sequence[str], env: Mapping[str, str], streams: tuple[int | None, int | None]
) -> subprocess.Popen[bytes]:
    """Start one worker; it dies when this process does."""
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
    """What a child calls first, so that it is killed when this process ends."""
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it was asked
            os._exit(1)

    return ask


POLL_SECONDS = 0.05
DISMISS_SECONDS = 5.0


class Guard:
    """The process that cleans up should this one be killed."""

    def __init__(self, temporary: Path | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        if temporary is not None:
            self.tell(f"d {temporary}")

    def tell(self, line: str) -> None:
        """One line of the guard's little language."""
        with suppress(BrokenPipeError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def dismiss(self) -> None:
        """All is clean: it may go."""
        self.tell("bye")
        with suppress(BrokenPipeError):
            try:
                self._process.communicate(timeout=DISMISS_SECONDS)
            except subprocess.TimeoutExpired:  # stopped, or the machine is busy: it has no more use
                self._process.kill()
                self._process.communicate()


class Fleet:
    """The workers and servers of one generation."""

    def __init__(self, screen: Screen, guard: Guard) -> None:
        self.members: list[Worker] = []
        self._screen = screen
        self._guard = guard

    def start(
        self, command: Sequence[str], options: LaunchOptions, place: RunDirectory, generation: int
    ) -> None:
        """Start servers and workers."""
        base = dict(os.environ)
        base |= defaults(options, base)
        for index in range(options.servers):
            env = server_environment(options, place, index=index, generation=generation)
            self._add(command, base | env, ("server", index), place)
        for index in range(options.workers):
            env = worker_environment(options, place, index=index, generation=generation)
            self._add(command, base | env, ("rank", int(env["RANK"])), place)

    def _add(
        self, command: Sequence[str], env: dict[str, str], who: tuple[str, int], place: RunDirectory
    ) -> None:
        kind, number = who
        if kind == "server":
            env = {name: value for name, value in env.items() if name not in contract.RANKS}
        key = f"{kind}-{number}"
        out, err, close = self._screen.streams(key, is_main=kind == "rank" and number == 0)
        try:
            process = spawn(command, env, (out, err))
        finally:
            for fd in close:
                os.close(fd)
        self._guard.tell(f"+{process.pid}")
        mark = f"joined-{number}" if kind == "rank" else f"joined-{key}"
        worker = Worker(
            f"{kind} {number}", key, number if kind == "rank" else -1, process,
            Path(env[contract.ERROR_FILE]), place.directory / mark,
        )  # fmt: skip
        self.members.append(worker)
        self._screen.follow(process, worker.name, len(self.members) - 1)

    @property
    def alive(self) -> list[Worker]:
        """Those who still run."""
        return [worker for worker in self.members if worker.code is None]

    @property
    def workers(self) -> list[Worker]:
        """The ranks, without servers."""
        return [worker for worker in self.members if worker.rank >= 0]

    def reap(self) -> list[Worker]:
        """Those who have ended since the last look."""
        ended = [worker for worker in self.alive if worker.reap()]
        for worker in ended:
            self._guard.tell(f"-{worker.process.pid}")
        return ended

    def look(self, seconds: float = POLL_SECONDS) -> list[Worker]:
        """Pass output on for a moment, then see who has ended."""
        self._screen.pump(seconds)
        return self.reap()

    def stop(self, number: int, grace_seconds: float, hurry: Callable[[], bool]) -> None:
        """Ask all to end; kill those who have not when the grace is over, or on hurry."""
        for _ in self._until_gone(number, grace_seconds):
            if hurry():
                break
        for _ in self._until_gone(signal.SIGKILL, 5.0):
            continue

    def _until_gone(self, number: int, seconds: float) -> Iterator[None]:
        for worker in self.alive:
            worker.stopped = True
            worker.signal(number)
            if number != signal.SIGKILL:
                worker.signal(signal.SIGCONT)  # a stopped process hears nothing else
        end = time.monotonic() + seconds
        while self.alive and time.monotonic() < end:
            yield
            self.look(POLL_SECONDS / 2)
