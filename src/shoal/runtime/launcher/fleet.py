"""All processes of one generation: started together, watched together, stopped together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from shoal.runtime.launcher import contract, guard
from shoal.runtime.launcher.options import LaunchOptions
from shoal.runtime.launcher.output import Screen
from shoal.runtime.launcher.workers import (
    Place,
    Worker,
    defaults,
    server_environment,
    spawn,
    worker_environment,
)

LOOK_SECONDS = 0.05
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
        self, command: Sequence[str], options: LaunchOptions, place: Place, generation: int
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
        self, command: Sequence[str], env: dict[str, str], who: tuple[str, int], place: Place
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

    def look(self, seconds: float = LOOK_SECONDS) -> list[Worker]:
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
            self.look(LOOK_SECONDS / 2)
