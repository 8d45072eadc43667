"""The options of the launcher, and their checks, which run before any process starts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cores import usable_cores
from shoal.errors import UnknownName, UsageError
from shoal.runtime.world.interfaces import gloo_choice, is_local

OUTPUTS = ("main", "all")
DEATHS = ("fail", "shrink", "replace")
BACKENDS = ("gloo", "nccl", "shoal")


@dataclass(frozen=True)
class LaunchOptions:
    """How to start the workers, where their output goes, and what to do when one dies."""

    workers: int = 1  # the number of workers on this machine
    servers: int = 0
    strategy: str | None = None
    backend: str | None = None
    output: str = "main"
    resume: bool = False
    checkpoint: Path | None = None
    max_restarts: int = 0
    timeout_seconds: float | None = None
    directory: Path | None = None
    hosts: tuple[str, ...] = ()
    node_rank: int = 0
    master: str | None = None
    port: int = 0
    oversubscribe: bool = False
    on_death: str = "fail"
    after: Callable[[Path], None] | None = None  # called after the run with its directory

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return max(1, len(self.hosts))

    @property
    def world_size(self) -> int:
        """The number of workers on all machines."""
        return self.workers * self.nodes

    @property
    def needs_store(self) -> bool:
        """Whether there are several processes, which need a store to find each other."""
        return self.world_size > 1 or self.servers > 0


def most_workers() -> int:
    """Return the largest sum of workers and servers that is accepted without --oversubscribe."""
    return max(64, 16 * usable_cores())


def parse_workers(text: str) -> int:
    """Return the number of workers that the option ``-n`` gives as ``text``."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"-n {text}: the number of workers must be a whole number") from None


def check(command: Sequence[str], options: LaunchOptions) -> None:
    """Check the script and the options. A UsageError says what is wrong and what to do."""
    _check_numbers(options)
    _check_script(command)
    _check_choices(options)
    if not 0 <= options.port <= 65535:
        raise UsageError(f"--port {options.port}: the port must lie in 1 .. 65535, or be 0 for any")
    for name, path in (("--dir", options.directory), ("--checkpoint", options.checkpoint)):
        why = None if path is None else unusable(path)
        _require(why is None, f"{name} {path}: {why}; choose another directory")
    gloo_choice()  # raises if GLOO_SOCKET_IFNAME names an interface that does not exist
    if options.nodes > 1:
        _check_nodes(options)
    elif options.node_rank != 0 or options.master:
        raise UsageError("--node-rank and --master have no effect without --hosts a,b")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _check_numbers(options: LaunchOptions) -> None:
    n, limit, cores = options.workers, most_workers(), usable_cores()
    _require(n >= 1, f"-n {n}: at least one worker is needed")
    _require(
        n + options.servers <= limit or options.oversubscribe,
        f"-n {n}: there are {cores} cores, and more than {limit} workers would only slow each "
        f"other down; use -n {cores}, or add --oversubscribe to start them anyway",
    )
    _require(options.servers >= 0, f"servers={options.servers}: the number must not be negative")
    restarts, seconds = options.max_restarts, options.timeout_seconds
    _require(restarts >= 0, f"--max-restarts {restarts}: the number must not be negative")
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise UsageError(f"--timeout {seconds:g}: seconds must be positive, as in --timeout 60")


def _check_script(command: Sequence[str]) -> None:
    _require(bool(command), "no training script was given; use: shoal run train.py -n 2")
    script = Path(command[0])
    _require(not script.is_dir(), f"{script} is a directory; name the training script in it")
    if not script.exists():
        raise UsageError(f"{script} does not exist (the current directory is {Path.cwd()})")
    readable = script.is_file() and os.access(script, os.R_OK)
    _require(readable, f"{script} is not a file, or cannot be read")


def _check_choices(options: LaunchOptions) -> None:
    for name, value, known in (
        ("--output", options.output, OUTPUTS),
        ("--backend", options.backend, BACKENDS),
        ("on_death", options.on_death, DEATHS),
    ):
        if value is not None and value not in known:
            raise UnknownName(name, value, known)
    _require(
        options.on_death == "fail",
        f"on_death={options.on_death!r}: the launcher does not support it yet; "
        "use 'fail', with --max-restarts to restart from the last checkpoint",
    )


def _check_nodes(options: LaunchOptions) -> None:
    hosts, last, rank = options.hosts, options.nodes - 1, options.node_rank
    unique = len(set(hosts)) == len(hosts) and all(hosts)
    _require(unique, f"--hosts {','.join(hosts)}: name each host once, separated by commas")
    valid = 0 <= rank <= last
    _require(valid, f"--node-rank {rank}: with {last + 1} hosts it must lie between 0 and {last}")
    host, port = master(options)
    _require(
        rank > 0 or is_local(host),
        f"--master {host}:{port}: node 0 must run on {host}, but {host} is not this machine",
    )
    _require(
        options.max_restarts == 0,
        "--max-restarts does not work with several hosts, because their launchers do not "
        "communicate; use torchrun --max-restarts, which runs the same script",
    )
    _require(options.servers == 0, "servers can be started on one machine only; leave out --hosts")
    _require(
        bool(os.environ.get("SHOAL_TOKEN")),
        "--hosts needs the same SHOAL_TOKEN on every host, so that no other process can join; "
        "export SHOAL_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')",
    )


def unusable(path: Path) -> str | None:
    """Return why a directory, which may not exist yet, cannot be used. None means it can."""
    if not str(path).isprintable():
        return "its name contains characters that cannot be printed"
    try:
        if path.is_symlink() and not path.exists():
            return "it is a symbolic link to a path that does not exist"
        nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    except OSError as error:  # for example, the name is too long
        return str(error.strerror)
    if not nearest.is_dir():
        return f"{nearest} is a file, not a directory"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written to"
    return None


def master(options: LaunchOptions) -> tuple[str, int]:
    """Return the host and port of the store, to which the workers of all hosts connect."""
    text = options.master or f"{options.hosts[0]}:29500"
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise UsageError(f"--master {text}: must be host:port, as in node0:29500")
    return host, int(port)
