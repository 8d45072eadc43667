"""Where workers run: on the hosts of a testbed, or all on loopback. Both start them alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from shoal.bench.exchange.telling import DOING, RATE
from shoal.errors import ShoalError
from shoal.runtime.launcher.processes import die_with_parent
from shoal.runtime.world.interfaces import IFNAME, loopback_name
from shoal.testing.processes import free_port

Tell = Callable[[str], None]
LAST_SECONDS = 60.0  # for the others to end, once rank 0 has
LOOK_SECONDS = 0.1
MOST_SECONDS = 600.0  # of one job: who takes longer hangs
LIMITED = "limited"  # beside the job, once the rate is what a worker asked for
_LAST_LINES = 12


class WorkersFailed(ShoalError):
    """A worker of a job failed, or hung.

    Attributes:
        found: what rank 0 had told before.
    """

    def __init__(self, why: str, found: list[dict[str, Any]]) -> None:
        super().__init__(f"a worker of the benchmark failed:\n{why}")
        self.found = found


class Place(Protocol):
    """Somewhere to start one worker a host; a :class:`shoal.testbed.Testbed` is one."""

    def start(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: int | None
    ) -> list[subprocess.Popen[str]]:
        """Start ``python words`` once a host, each told its rank."""

    def limit(self, rate: str) -> None:
        """Change the rate of all links, also while they are in use."""


class Loopback:
    """Workers of one machine, on a network without limits."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts

    def start(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: int | None
    ) -> list[subprocess.Popen[str]]:
        """Start ``python words`` once a host, each told its rank."""
        shared = {
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            IFNAME: loopback_name() or "lo",
            "OMP_NUM_THREADS": "1",
        }
        return [
            subprocess.Popen(
                [sys.executable, *words],
                env={**os.environ, **shared, "RANK": str(rank), **(env or {})},
                stdout=stdout,
                text=True,
                preexec_fn=die_with_parent(),
            )
            for rank in range(self.hosts)
        ]

    def limit(self, rate: str) -> None:
        """Nothing: memory has no rate to set."""


def work(
    place: Place, job: Mapping[str, Any], tell: Tell, *, seconds: float = MOST_SECONDS
) -> list[dict[str, Any]]:
    """Have the workers of a place do a job; what rank 0 found, line by line.

    Args:
        place: where.
        job: what, see ``worker``.
        tell: hears what is being done.
        seconds: after which they are taken to hang, and killed.

    Raises:
        WorkersFailed: a worker failed; its last words, and what was found before.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        words = ["-m", "shoal.bench.exchange.worker", str(path)]
        started = place.start(words, stdout=subprocess.PIPE)
        end = time.monotonic() + seconds
        watcher = Thread(target=_end_together, args=(started, end), daemon=True)
        watcher.start()

        def limit(rate: str) -> None:
            place.limit(rate)
            path.with_name(LIMITED).touch()

        try:
            found = _listen(started[0], tell, limit)
            watcher.join(LAST_SECONDS)
        finally:
            _kill(started)
            watcher.join()
        codes = [_reaped(child) for child in started]
        if any(codes):
            late = f"they had not ended after {seconds:.0f} s" if time.monotonic() > end else ""
            raise WorkersFailed(late or _last_words(Path(folder)), found)
    return found


def _last_words(folder: Path) -> str:
    said = sorted(folder.glob("error-*"))
    lines = said[0].read_text().strip().splitlines()[-_LAST_LINES:] if said else []
    return "\n".join(lines) or "it said nothing"


def _end_together(started: Sequence[subprocess.Popen[str]], end: float) -> None:
    """Until all have ended; when one fails the others would wait for it, so they are killed."""
    while any(child.poll() is None for child in started):
        if any(child.returncode for child in started) or time.monotonic() > end:
            _kill(started)
        time.sleep(LOOK_SECONDS)


def _kill(started: Sequence[subprocess.Popen[str]]) -> None:
    for child in started:
        if child.poll() is None:
            child.kill()


def _reaped(child: subprocess.Popen[str]) -> int:
    if child.stdout is not None:
        child.stdout.close()
    return child.wait()


def _listen(
    leader: subprocess.Popen[str], tell: Tell, limit: Callable[[str], None]
) -> list[dict[str, Any]]:
    found = []
    for line in leader.stdout or ():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # not ours: a library's
        if DOING in said:
            tell(said[DOING])
        elif RATE in said:
            limit(said[RATE])
        else:
            found.append(said)
    return found
