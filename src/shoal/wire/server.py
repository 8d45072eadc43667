"""The wire to parameter servers, which answer asks (bsp) or update the model (ssp and asp).

A worker has one connection to each server. With bsp, each ask goes to one server, and the servers
take turns. With ssp and asp, each parameter is stored on one server, which is called its home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ExchangeTimeout, FaultError, LayoutMismatch, PeerLost, UsageError
from shoal.flow import All, Ask, Push
from shoal.wire.channel import Channel, Message
from shoal.wire.wire import Pending, Ready

BEGIN, PULL, CALL = -1, -2, -3  # "round" of requests that belong to no round
Describe = Callable[[Ask], tuple[list[Any], list[Tensor]]]
Decode = Callable[[list[Tensor]], Any]
Body = tuple[dict[str, Any], Sequence[Tensor]]


class ServerConnection:
    """The channel to one server. It stores replies that arrive before the caller waits for them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._early: dict[int, Message] = {}

    def receive(self, round: int) -> Message:
        """Wait for the reply to ``round`` and return it. Raise the error that the server sends."""
        while round not in self._early:
            message = self.channel.receive()
            if message.kind == "error":
                raise error_of(self.channel.peer, message.facts)
            self._early[int(message.facts["round"])] = message
        return self._early.pop(round)


class PendingReply(NamedTuple):
    """The answer to an ask, which a server will send."""

    connection: ServerConnection
    round: int
    decode: Decode

    def wait(self) -> Any:
        """Block until the reply has arrived, and return the answer in it."""
        return self.decode(self.connection.receive(self.round).tensors)


class ServerWire:
    """Sends asks and pushes to parameter servers, and returns their answers.

    Args:
        channels: one connected channel for each server.
        workers: number of workers.
        describe: returns a JSON description of an ask, and its tensors.
        sizes: bytes of each parameter. Parameters are divided among the servers so that each
            server gets about the same number of bytes.
        groups: returns the current hyper-parameters of this worker's optimizer.
    """

    blocks = True

    def __init__(
        self,
        channels: Sequence[Channel],
        *,
        workers: int,
        describe: Describe,
        sizes: Mapping[str, int],
        groups: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self.size, self._rounds = workers, 0
        self._connections = [ServerConnection(channel) for channel in channels]
        self._describe, self._groups = describe, groups
        self.homes = assign_homes(sizes, len(channels))

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self._connections)

    def ask(self, ask: Ask) -> Pending:
        """Send an ask to the server whose turn it is, or a push to the homes of its parameters."""
        if isinstance(ask, Push):
            return Ready(self._push(ask.parts))
        connections = self._open()
        connection = connections[self._rounds % len(connections)]
        spec, tensors = self._describe(ask)
        connection.channel.send("ask", {"round": self._rounds, "spec": spec}, tensors)
        self._rounds += 1
        decode: Decode = tuple if isinstance(ask, All) else itemgetter(0)
        return PendingReply(connection, self._rounds - 1, decode)

    def _push(self, messages: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
        """Send each server the messages for its parameters, and return the updated parameters."""
        check_homes(self.homes, list(messages))
        groups, connections = self._groups(), self._open()
        for index, connection in enumerate(connections):
            own = {name: parts for name, parts in messages.items() if self.homes[name] == index}
            facts = {
                "round": self._rounds,
                "parts": {name: len(parts) for name, parts in own.items()},
                "groups": groups,
                "names": self._names_at(index),
            }
            connection.channel.send("push", facts, [t for parts in own.values() for t in parts])
        model = _merge_models(connection.receive(self._rounds) for connection in connections)
        self._rounds += 1
        return model

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Send each server its part of the initial model."""
        check_homes(self.homes, list(parameters))
        bodies = []
        for server in range(self.servers):
            names = [name for name in parameters if self.homes[name] == server]
            bodies.append(({"names": names}, [parameters[name] for name in names]))
        self.call("begin", bodies, round=BEGIN)

    def pull(self) -> dict[str, Tensor]:
        """Return the current parameters of all servers, by name."""
        bodies = [({"names": self._names_at(server)}, ()) for server in range(self.servers)]
        return _merge_models(self.call("pull", bodies, round=PULL))

    def call(self, kind: str, bodies: Sequence[Body], *, round: int = CALL) -> list[Message]:
        """Send each server a request of this kind (body i to server i), and return the replies."""
        replies = []
        for connection, (facts, tensors) in zip(self._open(), bodies, strict=True):
            connection.channel.send(kind, {**facts, "round": round}, tensors)
            replies.append(connection.receive(round))
        return replies

    def leave(self) -> None:
        """Tell every server that this worker is done, and disconnect. Lost servers are ignored."""
        connections, self._connections = self._connections, []
        for connection in connections:
            with suppress(FaultError):
                connection.channel.send("bye")
            connection.channel.close()

    def _open(self) -> list[ServerConnection]:
        if not self._connections:
            raise UsageError(
                "this run is closed, and it has disconnected from its servers; start another run"
            )
        return self._connections

    def _names_at(self, server: int) -> list[str]:
        return [name for name, home in self.homes.items() if home == server]


def _merge_models(replies: Iterable[Message]) -> dict[str, Tensor]:
    return {
        name: tensor
        for reply in replies
        for name, tensor in zip(reply.facts["names"], reply.tensors, strict=True)
    }


def assign_homes(sizes: Mapping[str, int], servers: int) -> dict[str, int]:
    """Assign each parameter, largest first, to the server that has the fewest bytes so far."""
    load = [0] * servers
    homes = {}
    for name, nbytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        homes[name] = home = load.index(min(load))
        load[home] += nbytes
    return homes


def check_homes(homes: Mapping[str, int], names: Sequence[str]) -> None:
    """Raise UsageError if a parameter is assigned to no server."""
    if missing := [name for name in names if name not in homes]:
        raise UsageError(
            f"{missing[0]} was added to the model after its parameters were assigned to servers; "
            "create all parameters before distribute"
        )


def hyper_parameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the current numbers and bools, such as ``lr``, of each parameter group.

    A tensor with one element, such as ``lr=torch.tensor(0.1)``, is returned as a number.
    """
    groups = []
    for group in optimizer.param_groups:
        values = {
            name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for name, value in group.items()
        }
        groups.append({name: v for name, v in values.items() if isinstance(v, (int, float))})
    return groups


def error_of(peer: str, facts: Mapping[str, Any]) -> Exception:
    """Return the exception that a server reported, as PeerLost if its type is not listed below."""
    for kind in (PeerLost, ExchangeTimeout, LayoutMismatch, UsageError):
        if kind.__name__ == facts.get("type"):
            return kind(str(facts.get("text")))
    return PeerLost(f"{peer} failed: {facts.get('type')}: {facts.get('text')}")
