"""Make a testbed, change its rate, run programs on its hosts, take it down.

1. What the machine lacks is told before anything is made.
2. The record is written; then a guard is started, which removes everything should this process die.
3. The plan's commands run one by one; if one fails, what the others made is removed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from shoal.errors import UsageError
from shoal.runtime.launcher.processes import die_with_parent
from shoal.runtime.world.interfaces import IFNAME
from shoal.testbed import removal
from shoal.testbed.plan import (
    DEFAULT_NAME,
    DEVICE,
    Command,
    Host,
    Plan,
    build,
    hosts_file,
    inside,
    limits,
    plan,
    show_rate,
)
from shoal.testbed.record import Record, find, identity, records

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # or it warns of every peer whose address has no name
MASTER_PORT = 29500  # every testbed is a network of its own, so nobody else has taken it


def up(wanted: Plan) -> Record:
    """Make a testbed that stays until :func:`down`.

    Raises:
        UsageError: the machine lacks something, or a testbed of this name is up.
    """
    with Testbed(len(wanted.hosts), show_rate(wanted.rate), name=wanted.name) as bed:
        return bed.keep()


def down(name: str = DEFAULT_NAME) -> Record:
    """Remove a testbed, with whatever runs on it.

    Raises:
        UsageError: there is none of this name.
    """
    why_not()
    record = _existing(name)
    removal.remove(record.plan.namespaces, record.path)
    return record


def limit(rate: str, name: str = DEFAULT_NAME) -> Record:
    """Change the rate of a testbed that is up, and may be in use."""
    why_not()
    record = _existing(name)
    changed = Record(record.plan.at(rate), record.owner)
    _execute(limits(changed.plan))
    changed.write()
    return changed


class Testbed:
    """A testbed for as long as a ``with`` block lasts.

    >>> bed = Testbed(hosts=2, rate="100mbit", name="example")
    >>> bed.plan.hosts[1].address
    '10.77.0.2'

    Args:
        hosts: how many.
        rate: of each host, in each direction.
        name: by default one that no other process has.
    """

    __test__ = False  # pytest: not a class of tests

    def __init__(self, hosts: int = 4, rate: str = "1gbit", *, name: str | None = None) -> None:
        self.plan = plan(hosts, rate, name or f"bed-{os.getpid()}")
        self._open = ExitStack()  # what is to be undone
        self._kept = False

    def __enter__(self) -> Testbed:
        record = _claim(self.plan)
        with ExitStack() as made:
            made.enter_context(_guarded(record))
            made.callback(self._remove, record)
            _make(record)
            self._open = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def keep(self) -> Record:
        """Leave it up when the block and this process end."""
        self._kept = True
        record = Record(self.plan)
        record.write()
        return record

    def _remove(self, record: Record) -> None:
        if not self._kept:
            removal.remove(record.plan.namespaces, record.path)

    def limit(self, rate: str) -> None:
        """Change the rate; what is under way goes on at the new one."""
        self.plan = limit(rate, self.plan.name).plan

    def start(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: int | None
    ) -> list[subprocess.Popen[str]]:
        """Start a Python module or script on every host, one rank each, ready to meet.

        Args:
            words: what follows ``python``.
            env: more environment variables.
            stdout: as for :class:`subprocess.Popen`.
        """
        return [
            subprocess.Popen(
                inside(host, (sys.executable, *words)),
                env={**os.environ, **environment(self.plan, rank), **(env or {})},
                stdout=stdout,
                text=True,
                preexec_fn=die_with_parent(),
            )
            for rank, host in enumerate(self.plan.hosts)
        ]


def environment(bed: Plan, rank: int) -> dict[str, str]:
    """What torchrun would tell the only worker of a host, and which device gloo is to use."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(bed.hosts)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": bed.hosts[0].address,
        "MASTER_PORT": str(MASTER_PORT),
        IFNAME: DEVICE,
        "OMP_NUM_THREADS": "1",
        **QUIET,
    }


def why_not() -> None:
    """Raise a UsageError that names everything this machine lacks for a testbed."""
    lacks = []
    if not sys.platform.startswith("linux"):
        lacks.append(f"Linux (this is {sys.platform})")
    elif os.geteuid() != 0:
        lacks.append(f"root (you are user {os.geteuid()}): run it with sudo")
    lacks += [
        f"the command {tool} (Debian: apt install iproute2)"
        for tool in ("ip", "tc")
        if shutil.which(tool) is None
    ]
    if lacks:
        raise UsageError(
            "a testbed is made of network namespaces and traffic limits, which need "
            + " and ".join(lacks)
        )


def _claim(wanted: Plan) -> Record:
    """A record of ours, before anything else is; what a dead process left is removed."""
    why_not()
    for record in records():
        if record.stale:
            removal.remove(record.plan.namespaces, record.path)
    mine = Record(wanted, identity(os.getpid()))
    try:
        mine.write(new=True)
    except FileExistsError:
        there = find(wanted.name)
        told = "" if there is None else f" ({describe(there.plan)})"
        raise UsageError(
            f"testbed {wanted.name} is up already{told}: `shoal testbed down` removes it, "
            "`shoal testbed rate 100mbit` changes its rate, --name gives a second one"
        ) from None
    return mine


def _existing(name: str) -> Record:
    record = find(name)
    if record is None:
        known = [each.plan.name for each in records()]
        others = f"; there is {', '.join(known)}" if known else ""
        raise UsageError(f"no testbed {name} is up: `shoal testbed up` makes one{others}")
    return record


def describe(bed: Plan) -> str:
    """In a few words."""
    return f"{len(bed.hosts)} hosts at {show_rate(bed.rate)}"


def _make(record: Record) -> None:
    for host in record.plan.hosts:
        _name_hosts(host, record.plan)
    _execute(build(record.plan))


def _name_hosts(host: Host, bed: Plan) -> None:
    folder = removal.NAMES / host.namespace
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text(hosts_file(bed))


def _execute(commands: Sequence[Command]) -> None:
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            why = done.stderr.strip() or f"exit code {done.returncode}"
            raise UsageError(
                f"`{' '.join(command)}` failed: {why}; a testbed needs root with the right to make "
                "network namespaces (in a container: --privileged) and a kernel with veth, bridge "
                "and tbf"
            )


@contextmanager
def _guarded(record: Record) -> Iterator[None]:
    """Inside, the death of this process removes the testbed."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", removal.__file__, str(record.path), *record.plan.namespaces],
        stdin=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        yield
    finally:
        guard.communicate("bye")
