"""The wire to servers: who holds what, and what a server's error becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ExchangeTimeout, PeerLost, UsageError
from shoal.wire.channel import Message
from shoal.wire.server import ServerWire, assign_homes, check_homes, error_of, hyper_parameters

sizes = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 1000), max_size=12)


@given(sizes, st.integers(1, 4))
def test_every_parameter_has_one_home_and_loads_are_even(
    sizes: dict[str, int], servers: int
) -> None:
    homes = assign_homes(sizes, servers)
    assert homes.keys() == sizes.keys()
    loads = [sum(sizes[n] for n, home in homes.items() if home == s) for s in range(servers)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    assert assign_homes(dict(reversed(sizes.items())), servers) == homes


def test_hyper_parameters_travel_as_plain_numbers() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    (group,) = hyper_parameters(optimizer)
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)
    assert "params" not in group


def test_a_learning_rate_in_a_tensor_travels_as_well() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.5))
    (group,) = hyper_parameters(optimizer)
    assert group["lr"] == 0.5
    assert isinstance(group["lr"], float)


class Deaf:
    """A server's channel that notes what it is sent, and agrees to all of it."""

    def __init__(self, dead: bool = False) -> None:
        self.sent: list[Message] = []
        self.dead, self.closed = dead, False
        self.peer = "server"

    def send(self, kind: str, facts: Any = None, tensors: Any = ()) -> None:
        if self.dead:
            raise PeerLost("the server is lost")
        self.sent.append(Message(kind, facts or {}, list(tensors)))

    def receive(self) -> Message:
        return Message("told", self.sent[-1].facts, [])

    def close(self) -> None:
        self.closed = True


def wired(*channels: Deaf) -> ServerWire:
    return ServerWire(
        channels,  # type: ignore[arg-type]
        workers=2,
        describe=lambda ask: ([], []),
        sizes={"a": 8, "b": 4, "c": 4},
        groups=list,
    )


def test_each_server_begins_with_its_own_part_alone() -> None:
    servers = Deaf(), Deaf()
    wired(*servers).begin({name: torch.ones(1) for name in "abc"})
    assert [server.sent[0].facts["names"] for server in servers] == [["a"], ["b", "c"]]
    assert [len(server.sent[0].tensors) for server in servers] == [1, 2]


def test_a_dead_server_keeps_no_other_from_its_farewell() -> None:
    servers = Deaf(dead=True), Deaf()
    wire = wired(*servers)
    wire.leave()
    assert [message.kind for message in servers[1].sent] == ["bye"]
    assert all(server.closed for server in servers)
    wire.leave()  # a second time is nothing


def test_who_has_left_its_servers_is_told_so() -> None:
    wire = wired(Deaf())
    wire.leave()
    for ask in (wire.pull, lambda: wire.call("state", []), lambda: wire.begin({})):
        with pytest.raises(UsageError, match="closed"):
            ask()


def test_a_servers_error_is_raised_as_what_it_was() -> None:
    late = error_of("server 0", {"type": "ExchangeTimeout", "text": "rank 2 is missing"})
    assert isinstance(late, ExchangeTimeout)
    other = error_of("server 0", {"type": "KeyError", "text": "w"})
    assert isinstance(other, PeerLost)
    assert "server 0 failed: KeyError" in str(other)


def test_a_parameter_without_a_home_is_named() -> None:
    with pytest.raises(UsageError, match="late was added"):
        check_homes({"w": 0}, ["w", "late"])
