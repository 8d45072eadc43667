"""Plan a testbed: its hosts, and the commands that make its network. Nothing is executed here.

::

    shoal-NAME-0                   shoal-NAME-switch
    10.77.0.1  eth0 ──limit──>     port0 ┐
               eth0 <──limit──     port0 ┤
    shoal-NAME-1                         ├ bridge
    10.77.0.2  eth0 ──limit──>     port1 ┤
               eth0 <──limit──     port1 ┘

Each host is a network namespace, and so is the switch between them. The machine's own devices,
addresses and routes are not changed. Hosts can reach only each other. Deleting the namespaces
deletes everything. A token bucket (tc's tbf) at the device of a host limits what the host sends. A
second bucket, at the host's port of the switch, limits what the host receives.

Only bandwidth is limited. Delay and loss need netem, which many kernels are built without.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shoal.errors import BadArgument

Command = tuple[str, ...]

DEFAULT_NAME = "testbed"
PREFIX = "shoal-"
NETWORK = "10.77.0"
DEVICE = "eth0"
BRIDGE = "bridge"
MOST_HOSTS = 64
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLOWEST, FASTEST = 10**5, 10**11
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")

# A token bucket must be as large as the largest packet, or the kernel splits packets. After a pause
# a full bucket passes at full speed, so packets are kept short, which allows a small bucket.
PACKET_NBYTES = 16384
BURST_SECONDS, LEAST_BURST_NBYTES = 0.001, 32768
QUEUE_SECONDS, LEAST_QUEUE_NBYTES = 0.05, 262144


@dataclass(frozen=True)
class TestbedHost:
    """One machine of a testbed."""

    __test__ = False  # pytest: not a class of tests

    name: str
    address: str
    namespace: str
    port: str  # device on the switch to which this host is connected


@dataclass(frozen=True)
class TestbedPlan:
    """The name, the hosts and the rate of a testbed."""

    __test__ = False  # pytest: not a class of tests

    name: str
    hosts: tuple[TestbedHost, ...]
    rate: int  # in bits per second, for each host in each direction

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{PREFIX}{self.name}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces. Deleting them removes the testbed."""
        return (*(host.namespace for host in self.hosts), self.switch)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the hosts, in order."""
        return tuple(host.address for host in self.hosts)

    def at(self, rate: str) -> TestbedPlan:
        """Return the same plan with another rate."""
        return replace(self, rate=parse_rate(rate))


def plan(hosts: int, rate: str, name: str = DEFAULT_NAME) -> TestbedPlan:
    """Return the plan of a testbed.

    >>> plan(2, "1gbit").addresses
    ('10.77.0.1', '10.77.0.2')
    """
    if not 2 <= hosts <= MOST_HOSTS:
        raise BadArgument(f"--hosts {hosts}", f"a testbed must have 2 to {MOST_HOSTS} hosts")
    if not _NAME.fullmatch(name):
        why = "a name must begin with a lower-case letter, then have up to 30 of a-z, 0-9 and -"
        raise BadArgument(f"--name {name!r}", why)
    numbered = (
        TestbedHost(f"host{i}", f"{NETWORK}.{i + 1}", f"{PREFIX}{name}-{i}", f"port{i}")
        for i in range(hosts)
    )
    return TestbedPlan(name, tuple(numbered), parse_rate(rate))


def parse_rate(text: str) -> int:
    """Return a rate in bits per second.

    >>> parse_rate("1gbit"), parse_rate("2.5mbit")
    (1000000000, 2500000)
    """
    match = _RATE.fullmatch(text.strip().lower())
    if match is None:
        why = "a rate must be a number and one of " + ", ".join(UNITS) + ", as in 100mbit"
        raise BadArgument(f"rate {text!r}", why)
    bits = round(float(match[1]) * UNITS[match[2]])
    if not SLOWEST <= bits <= FASTEST:
        why = f"a rate must lie between {show_rate(SLOWEST)} and {show_rate(FASTEST)}"
        raise BadArgument(f"rate {text!r}", why)
    return bits


def show_rate(bits: int) -> str:
    """Return a rate in bits per second as text for :func:`parse_rate`, rounded to six digits.

    >>> show_rate(100_000_000)
    '100mbit'
    """
    unit = max((u for u in UNITS if bits >= UNITS[u]), key=lambda u: UNITS[u], default="bit")
    return f"{bits / UNITS[unit]:g}{unit}"


def build(bed: TestbedPlan) -> tuple[Command, ...]:
    """Return the commands that make the network and limit it, in order."""
    switch = bed.switch
    commands: list[Command] = [
        ("ip", "netns", "add", switch),
        ("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge"),
        ("ip", "-n", switch, "link", "set", BRIDGE, "up"),
    ]
    for host in bed.hosts:
        commands += _connect(host, switch)
    return (*commands, *limits(bed))


def _connect(host: TestbedHost, switch: str) -> tuple[Command, ...]:
    inside, outside = ("ip", "-n", host.namespace), ("ip", "-n", switch)
    cable = ("link", "add", DEVICE, "type", "veth", "peer", "name", host.port, "netns", switch)
    packets = ("gso_max_size", str(PACKET_NBYTES))
    return (
        ("ip", "netns", "add", host.namespace),
        (*inside, "link", "set", "lo", "up"),
        (*inside, *cable),
        (*inside, "link", "set", DEVICE, *packets),
        (*inside, "address", "add", f"{host.address}/24", "dev", DEVICE),
        (*outside, "link", "set", host.port, *packets, "master", BRIDGE, "up"),
        (*inside, "link", "set", DEVICE, "up"),
    )


def limits(bed: TestbedPlan) -> tuple[Command, ...]:
    """Return the commands that limit every host's rate, which also work on a network in use."""
    ends = [end for h in bed.hosts for end in ((h.namespace, DEVICE), (bed.switch, h.port))]
    bucket = _bucket(bed.rate)
    return tuple(
        ("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *bucket)
        for space, device in ends
    )


def _bucket(rate: int) -> Command:
    nbytes_per_second = rate / 8
    burst = max(LEAST_BURST_NBYTES, round(BURST_SECONDS * nbytes_per_second))
    queue = max(LEAST_QUEUE_NBYTES, round(QUEUE_SECONDS * nbytes_per_second))
    return ("tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "limit", f"{queue}b")


def hosts_file(bed: TestbedPlan) -> str:
    """Return the text of ``/etc/hosts`` for every host, with the names of all hosts."""
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in bed.hosts)]
    return "\n".join(lines) + "\n"


def inside(host: TestbedHost, words: tuple[str, ...]) -> Command:
    """Return the command that runs the command ``words`` on a host."""
    return ("ip", "netns", "exec", host.namespace, *words)
