"""The network addresses of this machine: which one gloo uses, and whether others can reach it.

Without GLOO_SOCKET_IFNAME gloo resolves this machine's host name and uses the first address that
it can bind. Many machines resolve their name to 127.0.1.1, which no other machine can reach.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from shoal.errors import UsageError

IFNAME = "GLOO_SOCKET_IFNAME"
LOOPBACK_NAMES = ("lo", "lo0")
ELSEWHERE = "192.0.2.1"  # an address reserved for documentation: it stands for another machine


def addresses(host: str) -> list[str]:
    """Return the addresses that a host name resolves to; none if it does not resolve."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address or the interface of this name."""
    if address in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def can_bind(address: str) -> bool:
    """Whether an interface of this machine that is up has this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_local(host: str) -> bool:
    """Whether ``host`` is this machine."""
    return any(is_loopback(a) or can_bind(a) for a in addresses(host))


def own_address(towards: str) -> str:
    """Return the address by which the host ``towards`` can reach this machine; sends no packet.

    The host name of this machine often resolves to 127.0.1.1, so the kernel is asked instead
    which address it would use for a connection.
    """
    for host in (towards, ELSEWHERE):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address = str(probe.getsockname()[0])
            if not is_loopback(address):
                return address
    return _host_name_address()


def _host_name_address() -> str:
    """Return the first usable address of this machine's host name."""
    usable = [a for a in addresses(socket.gethostname()) if can_bind(a)]
    return usable[0] if usable else "127.0.0.1"


def bind(
    port: int, *, everywhere: bool, name: str = "port ", instead: str = "choose another, or use 0"
) -> socket.socket:
    """Return a socket that listens on all interfaces or on loopback alone; port 0 is any free one.

    The error message names the port by ``name`` and says what to do ``instead``.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("" if everywhere else "127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError(f"{name}{port} cannot be used: {error.strerror}; {instead}") from error
    return listener


def loopback_name() -> str | None:
    """Return the name of the loopback interface, or None if it is unknown."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in LOOPBACK_NAMES if name in names), None)


def gloo_choice(environ: Mapping[str, str] | None = None) -> str:
    """Return the interface name or the address that gloo would use.

    Raises:
        UsageError: GLOO_SOCKET_IFNAME names an interface that does not exist.
    """
    named = (os.environ if environ is None else environ).get(IFNAME, "")
    if not named:
        return _host_name_address()
    known = [name for _, name in socket.if_nameindex()]
    for name in named.split(","):
        if name not in known:
            raise UsageError(f"{IFNAME}={named}: no interface {name!r}; one of: {', '.join(known)}")
    return named


def wrong_interface(master: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return why other machines could not reach this one over gloo, or None if they can."""
    choice = gloo_choice(environ)
    if not is_loopback(choice) or is_loopback(master) or all(map(is_loopback, addresses(master))):
        return None
    return (
        f"gloo would listen on {choice}, which other machines cannot reach: the host name "
        f"{socket.gethostname()!r} does not resolve to an address of a network interface; "
        f"set {IFNAME} to the interface that leads to {master} (`ip -br address` lists them)"
    )
