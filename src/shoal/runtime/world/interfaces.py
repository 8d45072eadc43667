"""Which address gloo would take, and whether other machines could reach it.

Without GLOO_SOCKET_IFNAME gloo resolves this machine's own name and takes the first address it
can bind; many machines resolve their name to 127.0.1.1, and then peers elsewhere wait in vain.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from shoal.errors import UsageError

IFNAME = "GLOO_SOCKET_IFNAME"
ELSEWHERE = "192.0.2.1"  # reserved for examples: stands for any other machine


def addresses(host: str) -> list[str]:
    """What a name resolves to; nothing when it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it."""
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
    found = addresses(host)
    return bool(found) and any(is_loopback(a) or can_bind(a) for a in found)


def own_address(towards: str) -> str:
    """The address of this machine by which others can reach it; no packet is sent.

    Its own name often resolves to 127.0.1.1, and so may, here, the name of who is to reach it.

    Args:
        towards: a host, whose side of this machine is meant.
    """
    for host in (towards, ELSEWHERE):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            found = str(probe.getsockname()[0])
            if not is_loopback(found):
                return found
    return _named_address()


def _named_address() -> str:
    """What this machine's own name resolves to."""
    usable = [a for a in addresses(socket.gethostname()) if can_bind(a)]
    return usable[0] if usable else "127.0.0.1"


def loopback_name() -> str | None:
    """The loopback interface's name, or None when it cannot be told."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def gloo_choice(environ: Mapping[str, str] | None = None) -> str:
    """The interface name or address gloo would use.

    Raises:
        UsageError: GLOO_SOCKET_IFNAME names an interface that does not exist.
    """
    env = os.environ if environ is None else environ
    named = env.get(IFNAME, "")
    if named:
        known = [name for _, name in socket.if_nameindex()]
        for name in named.split(","):
            if name not in known:
                raise UsageError(f"{IFNAME}={named}: no interface {name!r}; "
                                 f"one of: {', '.join(known)}")  # fmt: skip
        return named
    return _named_address()


def wrong_interface(master: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Why peers on other machines could not reach this one over gloo, or None when they can."""
    choice = gloo_choice(environ)
    if is_loopback(master) or not addresses(master) or all(map(is_loopback, addresses(master))):
        return None
    if not is_loopback(choice) and choice not in ("lo", "lo0"):
        return None
    return (
        f"gloo would listen on {choice}, which other machines cannot reach: the host name "
        f"{socket.gethostname()!r} does not resolve to an address of a network interface; "
        f"set {IFNAME} to the interface that leads to {master} (`ip -br address` lists them)"
    )
