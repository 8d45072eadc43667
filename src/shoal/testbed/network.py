"""Make a testbed, change its rate, run programs on its hosts, remove it.

1. Check that the machine has what a testbed needs.
2. Write the record. Then start a guard process, which removes everything if this process dies.
3. Run the commands of the plan one by one. If a command fails, remove what was made before.
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
from shoal.runtime.world.interfaces import IFNAME_VARIABLE
from shoal.testbed import removal
from shoal.testbed.plan import (
    DEFAULT_NAME,
    DEVICE,
    Command,
    TestbedPlan,
    build,
    hosts_file,
    inside,
    limits,
    plan,
    show_rate,
)
from shoal.testbed.record import TestbedRecord, find, identity, records

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch would warn of each address without a name
MASTER_PORT = 29500  # a port of the first host, whose ports no other host shares


def up(wanted: TestbedPlan) -> TestbedRecord:
    """Make a testbed that exists until :func:`down` is called, and return its record.

    Raises:
        UsageError: the machine cannot make a testbed, or one of this name exists.
    """
    with Testbed(len(wanted.hosts), show_rate(wanted.rate), name=wanted.name) as bed:
        return bed.keep()


def down(name: str = DEFAULT_NAME) -> TestbedRecord:
    """End the processes on a testbed, remove it, and return its last record.

    Raises:
        UsageError: no testbed has this name, or this machine cannot have testbeds.
    """
    require_support()
    record = _existing(name)
    removal.remove(record.plan.namespaces, record.path)
    return record


def limit(rate: str, name: str = DEFAULT_NAME) -> TestbedRecord:
    """Change the rate of a testbed, which may be in use, and return its new record."""
    require_support()
    record = _existing(name)
    changed = TestbedRecord(record.plan.at(rate), record.owner)
    _execute(limits(changed.plan))
    changed.write()
    return changed


class Testbed:
    """A testbed inside a ``with`` block. ``rate`` limits each host in each direction.

    >>> bed = Testbed(hosts=2, rate="100mbit", name="example")
    >>> bed.plan.hosts[1].address
    '10.77.0.2'
    """

    __test__ = False  # pytest: not a class of tests

    def __init__(self, hosts: int = 4, rate: str = "1gbit", *, name: str | None = None) -> None:
        self.plan = plan(hosts, rate, name or f"bed-{os.getpid()}")
        self._cleanup = ExitStack()  # removes the testbed, then ends the guard
        self._stays = False

    def __enter__(self) -> Testbed:
        record = _claim(self.plan)
        with ExitStack() as stack:
            stack.enter_context(_guarded(record))
            stack.callback(self._remove, record)
            _make(record)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def keep(self) -> TestbedRecord:
        """Let the testbed exist after the end of the block and of this process."""
        self._stays = True
        record = TestbedRecord(self.plan)
        record.write()
        return record

    def _remove(self, record: TestbedRecord) -> None:
        if not self._stays:
            removal.remove(record.plan.namespaces, record.path)

    def limit(self, rate: str) -> None:
        """Change the rate at once, also for messages that are being sent."""
        self.plan = limit(rate, self.plan.name).plan

    def start(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: int | None
    ) -> list[subprocess.Popen[str]]:
        """Start ``python *words`` on every host with torchrun's variables. Return the processes."""
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


def environment(bed: TestbedPlan, rank: int) -> dict[str, str]:
    """Return torchrun's variables for the only worker of a host, and gloo's network device."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(bed.hosts)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": bed.hosts[0].address,
        "MASTER_PORT": str(MASTER_PORT),
        IFNAME_VARIABLE: DEVICE,
        "OMP_NUM_THREADS": "1",
        **QUIET,
    }


def require_support() -> None:
    """Raise a UsageError that names everything that this machine lacks for a testbed."""
    missing = []
    if not sys.platform.startswith("linux"):
        missing.append(f"Linux (this is {sys.platform})")
    elif os.geteuid() != 0:
        missing.append(f"root (you are user {os.geteuid()}; run it with sudo)")
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    missing += [f"the command {tool} (Debian: apt install iproute2)" for tool in tools]
    if missing:
        what = "a testbed is made of network namespaces and traffic limits, which need"
        raise UsageError(f"{what} {' and '.join(missing)}")


def _claim(wanted: TestbedPlan) -> TestbedRecord:
    """Remove testbeds whose owners are dead. Write and return the record of a new testbed."""
    require_support()
    for record in records():
        if record.stale:
            removal.remove(record.plan.namespaces, record.path)
    claim = TestbedRecord(wanted, identity(os.getpid()))
    try:
        claim.write(new=True)
    except FileExistsError:
        existing = find(wanted.name)
        size = "" if existing is None else f" ({describe(existing.plan)})"
        raise UsageError(
            f"testbed {wanted.name} exists already{size}: `shoal testbed down` removes it, "
            "`shoal testbed rate 100mbit` changes its rate, and --name makes a second testbed"
        ) from None
    return claim


def _existing(name: str) -> TestbedRecord:
    record = find(name)
    if record is None:
        names = [each.plan.name for each in records()]
        others = f"; existing testbeds: {', '.join(names)}" if names else ""
        raise UsageError(f"there is no testbed {name}; `shoal testbed up` makes one{others}")
    return record


def describe(bed: TestbedPlan) -> str:
    """Return a text with the number of hosts and the rate."""
    return f"{len(bed.hosts)} hosts at {show_rate(bed.rate)}"


def _make(record: TestbedRecord) -> None:
    for host in record.plan.hosts:
        folder = removal.NETNS / host.namespace
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(hosts_file(record.plan))
    _execute(build(record.plan))


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
def _guarded(record: TestbedRecord) -> Iterator[None]:
    """Run a guard process in the block, which removes the testbed if this process dies."""
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
