"""The wire to servers: asks are summed there (bsp), pushes change the model there (ssp, asp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import (
    ExchangeTimeout,
    FaultError,
    LayoutMismatch,
    PeerLost,
    ShoalError,
    UsageError,
)
from shoal.flow import All, Ask, Push
from shoal.wire.channel import Channel, Message
from shoal.wire.wire import Pending, Ready

BEGIN, PULL, CALL = -1, -2, -3  # the rounds of what is no round
Describe = Callable[[Ask], tuple[list[Any], list[Tensor]]]


class Awaited(NamedTuple):
    """An answer that a server will send."""

    line: ServerConnection
    round: int
    shape: Callable[[list[Tensor]], Any]

    def wait(self) -> Any:
        """Read answers until mine is there."""
        return self.shape(self.line.take(self.round).tensors)


class ServerConnection:
    """One server's channel, and answers that came before they were asked for.

    Args:
        channel: to the server.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._early: dict[int, Message] = {}

    def take(self, round: int) -> Message:
        """The answer of a round."""
        while round not in self._early:
            message = self.channel.receive()
            if message.kind == "error":
                raise fault(self.channel.peer, message.facts)
            self._early[int(message.facts["round"])] = message
        return self._early.pop(round)


class ServerWire:
    """Answers asks and pushes through servers.

    Args:
        channels: one a server.
        workers: how many workers there are.
        describe: an ask as JSON and tensors.
        sizes: bytes of each parameter, by which they are dealt to servers.
        groups: tells the hyper-parameters of my optimizer now.
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
        self.size = workers
        self._lines = [ServerConnection(channel) for channel in channels]
        self._describe = describe
        self._groups = groups
        self._rounds = 0
        self.homes = deal(sizes, len(channels))

    def ask(self, ask: Ask) -> Pending:
        """Send an ask to the server whose turn it is, or a push to those that hold its names."""
        if isinstance(ask, Push):
            return Ready(self._push(ask.parts))
        lines = self._open()
        line = lines[self._rounds % len(lines)]
        spec, tensors = self._describe(ask)
        line.channel.send("ask", {"round": self._rounds, "spec": spec}, tensors)
        self._rounds += 1
        if isinstance(ask, All):
            return Awaited(line, self._rounds - 1, tuple)
        return Awaited(line, self._rounds - 1, lambda told: told[0])

    def _push(self, parts: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
        check(self.homes, list(parts))
        model: dict[str, Tensor] = {}
        groups, lines = self._groups(), self._open()
        for index, line in enumerate(lines):
            mine = {name: t for name, t in parts.items() if self.homes[name] == index}
            counts = {name: len(t) for name, t in mine.items()}
            names = self._held_by(index)
            facts = {"round": self._rounds, "parts": counts, "groups": groups, "names": names}
            line.channel.send("push", facts, [t for ts in mine.values() for t in ts])
        for line in lines:
            told = line.take(self._rounds)
            model.update(zip(told.facts["names"], told.tensors, strict=True))
        self._rounds += 1
        return model

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Give each server its part of the model to start from."""
        check(self.homes, list(parameters))
        for index, line in enumerate(self._open()):
            names = [name for name in parameters if self.homes[name] == index]
            facts = {"round": BEGIN, "names": names}
            line.channel.send("begin", facts, [parameters[name] for name in names])
            line.take(BEGIN)

    def pull(self) -> dict[str, Tensor]:
        """The servers' model as it is now."""
        model: dict[str, Tensor] = {}
        for index, line in enumerate(self._open()):
            line.channel.send("pull", {"round": PULL, "names": self._held_by(index)})
            told = line.take(PULL)
            model.update(zip(told.facts["names"], told.tensors, strict=True))
        return model

    def call(
        self, kind: str, bodies: Sequence[tuple[dict[str, Any], Sequence[Tensor]]]
    ) -> list[Message]:
        """Ask every server something else, each with its own body; their answers in order."""
        told = []
        for line, (facts, tensors) in zip(self._open(), bodies, strict=True):
            line.channel.send(kind, {**facts, "round": CALL}, tensors)
            told.append(line.take(CALL))
        return told

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._lines)

    def leave(self) -> None:
        """Say goodbye to every server that is still there."""
        lines, self._lines = self._lines, []
        for line in lines:
            with suppress(FaultError):
                line.channel.send("bye")
            line.channel.close()

    def _open(self) -> list[ServerConnection]:
        if not self._lines:
            raise UsageError("this run is closed, and its servers are left; start another")
        return self._lines

    def _held_by(self, server: int) -> list[str]:
        return [name for name, home in self.homes.items() if home == server]


def deal(sizes: Mapping[str, int], servers: int) -> dict[str, int]:
    """Give each parameter, largest first, to the server that holds least so far."""
    load = [0] * servers
    homes = {}
    for name, nbytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        home = load.index(min(load))
        homes[name] = home
        load[home] += nbytes
    return homes


def rates(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyper-parameters that are numbers, which a scheduler may change; also lr=tensor(0.1)."""
    return [
        {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if isinstance(value, (int, float)) or _is_scalar(value)
        }
        for group in optimizer.param_groups
    ]


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def fault(peer: str, facts: Mapping[str, Any]) -> Exception:
    """The error that a server met, as it is raised here."""
    known: dict[str, type[ShoalError]] = {
        kind.__name__: kind for kind in (PeerLost, ExchangeTimeout, LayoutMismatch, UsageError)
    }
    kind = known.get(str(facts.get("type")))
    if kind is None:
        return PeerLost(f"{peer} failed: {facts.get('type')}: {facts.get('text')}")
    return kind(str(facts.get("text")))


def check(homes: Mapping[str, int], names: Sequence[str]) -> None:
    """Every name has a home."""
    if missing := [name for name in names if name not in homes]:
        raise UsageError(f"{missing[0]} joined after the servers were given their parts")
