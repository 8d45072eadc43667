"""Run a job on worker processes: on the hosts of a testbed, or all on loopback."""

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

from benchmarks.exchange.progress import DOING, LIMITED, RATE
from shoal.errors import ShoalError
from shoal.runtime.launcher.processes import die_with_parent
from shoal.runtime.world.interfaces import IFNAME_VARIABLE, loopback_name
from shoal.testing.processes import free_port

CHECKOUT = Path(__file__).parents[2]
LAST_SECONDS = 60.0  # for the other ranks to end, once rank 0 has
POLL_SECONDS = 0.1
MOST_SECONDS = 600.0  # of one job: after that it hangs
_ERROR_LINES = 12


class JobFailed(ShoalError):
    """A worker of a job failed, or hung.

    Attributes:
        messages: what rank 0 had written before.
    """

    def __init__(self, why: str, messages: list[dict[str, Any]]) -> None:
        super().__init__(f"a worker of the benchmark failed:\n{why}")
        self.messages = messages


class Cluster(Protocol):
    """Hosts that each start one worker; a :class:`shoal.testbed.Testbed` is one."""

    def start(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: int | None
    ) -> list[subprocess.Popen[str]]:
        """Start ``python words`` once on each host, with its rank in the environment."""

    def limit(self, rate: str) -> None:
        """Change the rate of all links, also while they are in use."""


class Loopback:
    """Workers on one machine, without a limit on their links."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts

    def start(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: int | None
    ) -> list[subprocess.Popen[str]]:
        """Start ``python words`` once for each host, with its rank in the environment."""
        shared = {
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            IFNAME_VARIABLE: loopback_name() or "lo",
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
        """Do nothing: loopback has no rate to set."""


def run_job(
    cluster: Cluster,
    job: Mapping[str, Any],
    report: Callable[[str], None],
    *,
    seconds: float = MOST_SECONDS,
) -> list[dict[str, Any]]:
    """Run a job on the workers of a cluster; return the results that rank 0 wrote.

    Args:
        cluster: where the workers run.
        job: what they do, see ``worker``.
        report: called with what is being done.
        seconds: after that many the workers hang, and are killed.

    Raises:
        JobFailed: a worker failed; it has the end of the traceback, and the results before.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        words = ["-m", f"{__package__}.worker", str(path)]
        search = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
        workers = cluster.start(words, env={"PYTHONPATH": search}, stdout=subprocess.PIPE)
        end = time.monotonic() + seconds
        watcher = Thread(target=_end_together, args=(workers, end), daemon=True)
        watcher.start()

        def limit(rate: str) -> None:
            cluster.limit(rate)
            path.with_name(LIMITED).touch()

        try:
            messages = _read_messages(workers[0], report, limit)
            watcher.join(LAST_SECONDS)
        finally:
            _kill(workers)
            watcher.join()
        codes = [_exit_code(worker) for worker in workers]
        if any(codes):
            late = f"they had not ended after {seconds:.0f} s" if time.monotonic() > end else ""
            raise JobFailed(late or _error(Path(folder)), messages)
    return messages


def _error(folder: Path) -> str:
    files = sorted(folder.glob("error-*"))
    lines = files[0].read_text().strip().splitlines()[-_ERROR_LINES:] if files else []
    return "\n".join(lines) or "it wrote no error"


def _end_together(workers: Sequence[subprocess.Popen[str]], end: float) -> None:
    """Wait until all have ended; when one fails, kill the others, which would wait for it."""
    while any(worker.poll() is None for worker in workers):
        if any(worker.returncode for worker in workers) or time.monotonic() > end:
            _kill(workers)
        time.sleep(POLL_SECONDS)


def _kill(workers: Sequence[subprocess.Popen[str]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.kill()


def _exit_code(worker: subprocess.Popen[str]) -> int:
    if worker.stdout is not None:
        worker.stdout.close()
    return worker.wait()


def _read_messages(
    leader: subprocess.Popen[str], report: Callable[[str], None], limit: Callable[[str], None]
) -> list[dict[str, Any]]:
    messages = []
    for line in leader.stdout or ():
        try:
            message = json.loads(line)
        except ValueError:
            continue  # a library's output
        if DOING in message:
            report(message[DOING])
        elif RATE in message:
            limit(message[RATE])
        else:
            messages.append(message)
    return messages
