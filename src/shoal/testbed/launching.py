"""``shoal run --hosts testbed``: a launcher on every host of a testbed, as on real machines."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from shoal.errors import UsageError
from shoal.runtime.launcher.options import LaunchOptions
from shoal.runtime.launcher.processes import die_with_parent
from shoal.runtime.world.env import TOKEN
from shoal.runtime.world.interfaces import IFNAME
from shoal.testbed.network import QUIET, why_not
from shoal.testbed.plan import DEFAULT_NAME, DEVICE, Plan, inside
from shoal.testbed.record import find

FOLLOW_SECONDS = 15.0
LOOK_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Launcher = subprocess.Popen[bytes]


def named(hosts: Sequence[str]) -> Plan | None:
    """The testbed that ``--hosts`` names, if it names one.

    Raises:
        UsageError: it names the usual one, which is not up.
    """
    if len(hosts) != 1:
        return None
    record = find(hosts[0])
    if record is None and hosts[0] == DEFAULT_NAME:
        raise UsageError("--hosts testbed: no testbed is up; make one with `shoal testbed up`")
    return record.plan if record else None


def launch_on(bed: Plan, command: Sequence[str], options: LaunchOptions) -> int:
    """Run a launcher on every host; rank 0's has the terminal, a failing one's words are shown."""
    why_not()
    if options.servers:
        raise UsageError("servers are started on one machine only; leave out --hosts")
    token = os.environ.get(TOKEN) or secrets.token_hex(16)
    env = {**QUIET, **os.environ, TOKEN: token, IFNAME: DEVICE}
    python = (sys.executable, "-m", "shoal", "run")
    hides = options.output == "main"
    with (
        tempfile.TemporaryDirectory(prefix="shoal-") as spare,
        tempfile.TemporaryFile() as told,
        _caught() as caught,
    ):
        launchers = [
            subprocess.Popen(
                inside(host, (*python, *words(bed, command, placed(options, rank, spare), rank))),
                env=env,
                stdout=told if rank and hides else None,
                stderr=told if rank else None,
                preexec_fn=die_with_parent(),
                start_new_session=True,  # Ctrl-C comes by way of us, once
            )
            for rank, host in enumerate(bed.hosts)
        ]
        code = _wait(launchers, caught)
        if code and launchers[0].returncode == 0:
            _show(told)
    return code


def placed(options: LaunchOptions, rank: int, spare: str) -> LaunchOptions:
    """The same with a directory of each host's own; without --dir, only the first host's stays."""
    if options.directory is None:
        return options if rank == 0 else replace(options, directory=Path(spare, f"host{rank}"))
    return replace(options, directory=Path(options.directory, f"host{rank}"))


def words(bed: Plan, command: Sequence[str], options: LaunchOptions, rank: int) -> list[str]:
    """What one would type after ``shoal run`` on one of the hosts."""
    said = {
        "--workers": str(options.workers),
        "--hosts": ",".join(bed.addresses),
        "--node-rank": str(rank),
        "--output": options.output,
        "--strategy": options.strategy,
        "--backend": options.backend,
        "--checkpoint": options.checkpoint,
        "--timeout": options.timeout_seconds,
        "--dir": options.directory,
        "--max-restarts": options.max_restarts or None,
    }
    flags = [w for name, value in said.items() if value is not None for w in (name, str(value))]
    flags += ["--resume"] * options.resume + ["--oversubscribe"] * options.oversubscribe
    return [command[0], *flags, "--", *command[1:]]


def _wait(launchers: Sequence[Launcher], caught: list[int]) -> int:
    """Until all have ended; the first bad exit code, or the signal that was passed on."""
    failed, passed_on = 0.0, 0
    codes: dict[int, int] = {}
    while len(codes) < len(launchers):
        time.sleep(LOOK_SECONDS)
        for rank, launcher in enumerate(launchers):
            if rank not in codes and launcher.poll() is not None:
                codes[rank] = launcher.returncode
        bad = any(codes.values())
        failed = failed or (time.monotonic() if bad else 0.0)
        for number in caught[passed_on:]:
            _signal(launchers, number)
        passed_on = len(caught)
        if failed and time.monotonic() - failed > FOLLOW_SECONDS:
            _signal(launchers, signal.SIGTERM)
            failed = time.monotonic()
    if caught:
        return 128 + caught[0]
    return next((code if code > 0 else 128 - code for code in codes.values() if code), 0)


def _signal(launchers: Sequence[Launcher], number: int) -> None:
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.send_signal(number)


def _show(told: IO[bytes]) -> None:
    told.seek(0)
    sys.stderr.buffer.write(told.read())
    sys.stderr.flush()


@contextmanager
def _caught() -> Iterator[list[int]]:
    """Signals that came meanwhile, to be passed on."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in _SIGNALS}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
