"""Implement ``shoal run --hosts testbed``: start one launcher on every host of a testbed."""

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

from shoal.errors import UsageError
from shoal.runtime.launcher.options import LaunchOptions
from shoal.runtime.launcher.processes import die_with_parent
from shoal.runtime.world.env import TOKEN
from shoal.runtime.world.interfaces import IFNAME_VARIABLE
from shoal.testbed.network import QUIET, require_support
from shoal.testbed.plan import DEFAULT_NAME, DEVICE, TestbedPlan, inside
from shoal.testbed.record import find

FOLLOW_SECONDS = 15.0
POLL_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Launcher = subprocess.Popen[bytes]


def find_testbed(hosts: Sequence[str]) -> TestbedPlan | None:
    """Return the testbed that ``--hosts`` names, or None if it names ordinary hosts.

    Raises:
        UsageError: ``--hosts`` names the default testbed, which does not exist.
    """
    if len(hosts) != 1:
        return None
    record = find(hosts[0])
    if record is None and hosts[0] == DEFAULT_NAME:
        raise UsageError("--hosts testbed: there is no testbed; make one with `shoal testbed up`")
    return record.plan if record else None


def launch_on(bed: TestbedPlan, command: Sequence[str], options: LaunchOptions) -> int:
    """Run one launcher on every host, wait for all, and return the exit code.

    The first host's launcher writes to the terminal. With ``--output all`` the others' standard
    output goes there, too. Their other output is shown only if one fails but the first does not.
    """
    require_support()
    if options.servers:
        raise UsageError("--hosts cannot be used with servers, which run on one machine only")
    token = os.environ.get(TOKEN) or secrets.token_hex(16)
    env = {**QUIET, **os.environ, TOKEN: token, IFNAME_VARIABLE: DEVICE}
    python = (sys.executable, "-m", "shoal", "run")
    hide_others = options.output == "main"
    with (
        tempfile.TemporaryDirectory(prefix="shoal-") as temporary,
        tempfile.TemporaryFile() as output,
        _signals() as received,
    ):
        launchers = []
        for rank, host in enumerate(bed.hosts):
            words = arguments(bed, command, options_of(rank, options, temporary), rank)
            launcher = subprocess.Popen(
                inside(host, (*python, *words)),
                env=env,
                stdout=output if rank and hide_others else None,
                stderr=output if rank else None,
                preexec_fn=die_with_parent(),
                start_new_session=True,  # _wait passes Ctrl-C on to the launcher
            )
            launchers.append(launcher)
        code = _wait(launchers, received)
        if code and launchers[0].returncode == 0:
            output.seek(0)
            sys.stderr.buffer.write(output.read())
            sys.stderr.flush()
    return code


def options_of(rank: int, options: LaunchOptions, temporary: str) -> LaunchOptions:
    """Return one host's options, with its own directory. Without ``--dir``, rank 0 has none."""
    if options.directory is None:
        return options if rank == 0 else replace(options, directory=Path(temporary, f"host{rank}"))
    return replace(options, directory=Path(options.directory, f"host{rank}"))


def arguments(
    bed: TestbedPlan, command: Sequence[str], options: LaunchOptions, rank: int
) -> list[str]:
    """Return the arguments of ``shoal run`` on the host with this node rank."""
    values = {
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
    flags = [w for name, value in values.items() if value is not None for w in (name, str(value))]
    flags += ["--resume"] * options.resume + ["--oversubscribe"] * options.oversubscribe
    return [command[0], *flags, "--", *command[1:]]


def _wait(launchers: Sequence[Launcher], received: list[int]) -> int:
    """Wait until all launchers have ended, and pass received signals on to them.

    When one fails, the others get SIGTERM after ``FOLLOW_SECONDS``. Returns 128 plus the number of
    the first received signal. Without a signal it returns the first exit code that is not 0, if
    there is one, and otherwise 0.
    """
    failed, passed_on = 0.0, 0
    codes: dict[int, int] = {}
    while len(codes) < len(launchers):
        time.sleep(POLL_SECONDS)
        for rank, launcher in enumerate(launchers):
            if rank not in codes and launcher.poll() is not None:
                codes[rank] = launcher.returncode
        failed = failed or (time.monotonic() if any(codes.values()) else 0.0)
        for number in received[passed_on:]:
            _signal(launchers, number)
        passed_on = len(received)
        if failed and time.monotonic() - failed > FOLLOW_SECONDS:
            _signal(launchers, signal.SIGTERM)
            failed = time.monotonic()
    if received:
        return 128 + received[0]
    return next((code if code > 0 else 128 - code for code in codes.values() if code), 0)


def _signal(launchers: Sequence[Launcher], number: int) -> None:
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.send_signal(number)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list to which SIGINT, SIGTERM and SIGHUP are appended, without other effect."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
