"""Find the network address that gloo uses, and whether other machines can reach it.

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

IFNAME_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK_NAMES = ("lo", "lo0")
OTHER_MACHINE_ADDRESS = "192.0.2.1"  # reserved for documentation, so it is no address of ours


def addresses(host: str) -> list[str]:
    """Return the IP addresses that a host name resolves to, or [] if it does not resolve."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback address or the name of a loopback interface."""
    if address in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def can_bind(address: str) -> bool:
    """Whether a socket can be bound to ``address``, so that it is an address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_local(host: str) -> bool:
    """Whether ``host`` resolves to an address of this machine."""
    return any(is_loopback(a) or can_bind(a) for a in addresses(host))


def own_address(peer_host: str) -> str:
    """Return the address at which ``peer_host`` probably reaches this machine. Sends no packet.

    The host name of this machine often resolves to 127.0.1.1. Therefore the kernel is asked which
    address it would use for a connection to ``peer_host``.
    """
    for host in (peer_host, OTHER_MACHINE_ADDRESS):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address = str(probe.getsockname()[0])
            if not is_loopback(address):
                return address
    return _host_name_address()


def _host_name_address() -> str:
    """Return the first address of this machine's host name that can be bound, or 127.0.0.1."""
    usable = [a for a in addresses(socket.gethostname()) if can_bind(a)]
    return usable[0] if usable else "127.0.0.1"


def bind(
    port: int, *, everywhere: bool, label: str = "port ", advice: str = "choose another, or use 0"
) -> socket.socket:
    """Return a socket that listens on ``port``, where 0 means any free port.

    With ``everywhere`` it listens on all interfaces, otherwise only on 127.0.0.1. In the error
    message ``label`` is the text before the port, and ``advice`` says what to do.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("" if everywhere else "127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError(f"{label}{port} cannot be used: {error.strerror}; {advice}") from error
    return listener


def loopback_name() -> str | None:
    """Return the name of the loopback interface, or None if neither lo nor lo0 exists."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in LOOPBACK_NAMES if name in names), None)


def gloo_choice(environ: Mapping[str, str] | None = None) -> str:
    """Return the value of GLOO_SOCKET_IFNAME, or if it is unset the address gloo would use.

    Raises:
        UsageError: GLOO_SOCKET_IFNAME names an interface that does not exist.
    """
    interface_names = (os.environ if environ is None else environ).get(IFNAME_VARIABLE, "")
    if not interface_names:
        return _host_name_address()
    known = [name for _, name in socket.if_nameindex()]
    for name in interface_names.split(","):
        if name not in known:
            why = f"this machine has no interface {name!r}; choose one of: {', '.join(known)}"
            raise UsageError(f"{IFNAME_VARIABLE}={interface_names}: {why}")
    return interface_names


def why_unreachable(master: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return why the machine ``master`` cannot reach gloo here, or None if it probably can."""
    choice = gloo_choice(environ)
    if not is_loopback(choice) or is_loopback(master) or all(map(is_loopback, addresses(master))):
        return None
    why = f"the host name {socket.gethostname()!r} resolves to no other address of this machine"
    if choice in LOOPBACK_NAMES:  # an interface name comes from GLOO_SOCKET_IFNAME
        why = f"{IFNAME_VARIABLE}={choice} is the loopback interface"
    return (
        f"gloo would listen on {choice}, which other machines cannot reach, because {why}; set "
        f"{IFNAME_VARIABLE} to the interface that {master} is reached by (see `ip -br address`)"
    )
