"""A network as data: who is on it, and the commands that make it and limit it. Pure.

::

    shoal-NAME-0                   shoal-NAME-switch
    10.77.0.1  eth0 ──limit──>     port0 ┐
               eth0 <──limit──     port0 ┤
    shoal-NAME-1                         ├ bridge
    10.77.0.2  eth0 ──limit──>     port1 ┤
               eth0 <──limit──     port1 ┘

A host is a network namespace, and the switch between them has one of its own: the machine's own
devices, addresses and routes stay as they are, hosts reach each other and nobody else, and who
deletes the namespaces has deleted everything. A token bucket (tc's tbf) at a host's device limits
what it sends, one at its port of the switch limits what it receives.

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

# A bucket must hold the largest packet, or the kernel cuts packets up at its leisure. Short packets
# let it be small, so that few bytes slip through at full speed after a pause.
PACKET_NBYTES = 16384
BURST_SECONDS, LEAST_BURST_NBYTES = 0.001, 32768
QUEUE_SECONDS, LEAST_QUEUE_NBYTES = 0.05, 262144


@dataclass(frozen=True)
class Host:
    """One machine of a testbed: its name, its address, and the namespace it lives in."""

    name: str
    address: str
    namespace: str
    port: str  # its device's other end, on the switch


@dataclass(frozen=True)
class Plan:
    """A testbed that could be made."""

    name: str
    hosts: tuple[Host, ...]
    rate: int  # bits a second, of each host in each direction

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{PREFIX}{self.name}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All that must be deleted for nothing to be left."""
        return (*(host.namespace for host in self.hosts), self.switch)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the hosts, in order."""
        return tuple(host.address for host in self.hosts)

    def at(self, rate: str) -> Plan:
        """The same hosts behind other cables."""
        return replace(self, rate=parse_rate(rate))


def plan(hosts: int, rate: str, name: str = DEFAULT_NAME) -> Plan:
    """A testbed of so many hosts.

    >>> plan(2, "1gbit").addresses
    ('10.77.0.1', '10.77.0.2')
    """
    if not 2 <= hosts <= MOST_HOSTS:
        raise BadArgument(f"--hosts {hosts}", f"a testbed has 2 to {MOST_HOSTS} hosts")
    if not _NAME.fullmatch(name):
        why = "a name has small letters, digits and dashes, and begins with a letter"
        raise BadArgument(f"--name {name!r}", why)
    numbered = (
        Host(f"host{i}", f"{NETWORK}.{i + 1}", f"{PREFIX}{name}-{i}", f"port{i}")
        for i in range(hosts)
    )
    return Plan(name, tuple(numbered), parse_rate(rate))


def parse_rate(text: str) -> int:
    """Bits a second, from what one types.

    >>> parse_rate("1gbit"), parse_rate("2.5mbit")
    (1000000000, 2500000)
    """
    match = _RATE.fullmatch(text.strip().lower())
    if match is None:
        why = "a rate is a number and one of " + ", ".join(UNITS) + ", as in 100mbit"
        raise BadArgument(f"rate {text!r}", why)
    bits = round(float(match[1]) * UNITS[match[2]])
    if not SLOWEST <= bits <= FASTEST:
        why = f"lies between {show_rate(SLOWEST)} and {show_rate(FASTEST)}"
        raise BadArgument(f"rate {text!r}", f"a rate {why}")
    return bits


def show_rate(bits: int) -> str:
    """As one would type it.

    >>> show_rate(100_000_000)
    '100mbit'
    """
    unit = max((u for u in UNITS if bits >= UNITS[u]), key=lambda u: UNITS[u], default="bit")
    return f"{bits / UNITS[unit]:g}{unit}"


def build(wanted: Plan) -> tuple[Command, ...]:
    """Commands that make the network and limit it, in order."""
    switch = wanted.switch
    commands: list[Command] = [
        ("ip", "netns", "add", switch),
        ("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge"),
        ("ip", "-n", switch, "link", "set", BRIDGE, "up"),
    ]
    for host in wanted.hosts:
        commands += _plug_in(host, switch)
    return (*commands, *limits(wanted))


def _plug_in(host: Host, switch: str) -> tuple[Command, ...]:
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


def limits(wanted: Plan) -> tuple[Command, ...]:
    """Commands that limit every host in both directions; also on a network in use."""
    ends = [end for h in wanted.hosts for end in ((h.namespace, DEVICE), (wanted.switch, h.port))]
    bucket = _bucket(wanted.rate)
    return tuple(
        ("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *bucket)
        for space, device in ends
    )


def _bucket(rate: int) -> Command:
    nbytes_a_second = rate / 8
    burst = max(LEAST_BURST_NBYTES, round(BURST_SECONDS * nbytes_a_second))
    queue = max(LEAST_QUEUE_NBYTES, round(QUEUE_SECONDS * nbytes_a_second))
    return ("tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "limit", f"{queue}b")


def hosts_file(wanted: Plan) -> str:
    """What ``/etc/hosts`` says on every host: each other's names."""
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in wanted.hosts)]
    return "\n".join(lines) + "\n"


def inside(host: Host, words: tuple[str, ...]) -> Command:
    """A command, run on a host."""
    return ("ip", "netns", "exec", host.namespace, *words)
