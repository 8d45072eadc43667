"""Tensors over a socket: what goes in comes out; what is not ours is refused, never executed."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shoal.errors import PeerLost
from shoal.wire.channel import DTYPES, MAGIC, Channel, Hello, accept, connect, listen


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    listener = listen(local=True)
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    channels = Channel(one, "rank 0"), Channel(other, "rank 1")
    yield channels
    for channel in channels:
        channel.close()
    listener.close()


def header(told: object) -> bytes:
    text = json.dumps(told).encode()
    return MAGIC + struct.pack(">I", len(text)) + text


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_numbers_of_every_type_arrive_as_they_were(
    name: str, ends: tuple[Channel, Channel]
) -> None:
    here, there = ends
    sent = [torch.arange(6).to(DTYPES[name]).view(2, 3).T, torch.ones((), dtype=DTYPES[name])]
    sent.append(torch.empty(0, 4, dtype=DTYPES[name]))
    here.send("kind", {"fact": 1}, sent)
    told = there.receive()
    assert (told.kind, told.facts) == ("kind", {"fact": 1})
    for mine, theirs in zip(sent, told.tensors, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + struct.pack(">I", 2**31),
        header("text"),
        header({"kind": "x"}),
        header({"kind": "x", "facts": {}, "tensors": [["object", [1]]]}),
        header({"kind": "x", "facts": {}, "tensors": [["float32", [-1]]]}),
        header({"kind": "x", "facts": {}, "tensors": [["float32", [2**39]]]}),
        header({"kind": "x", "facts": {}, "tensors": [["float32", [2]]]}) + b"abc",
        MAGIC,
        b"",
    ],
)
def test_what_is_not_a_message_is_a_lost_peer(sent: bytes, ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    here._socket.sendall(sent)
    here.close()
    with pytest.raises(PeerLost, match="rank 1"):
        there.receive()


def visited(token: str, generation: int) -> tuple[Channel, int] | None:
    listener = listen(local=True)
    found: list[tuple[Channel, int] | None] = []

    def take() -> None:
        found.append(accept(listener, token="secret", generation=3))

    thread = threading.Thread(target=take)
    thread.start()
    host, port = listener.getsockname()
    hello = Hello(token, generation, 7)
    channel = connect(host, port, hello=hello, peer="server 0", seconds=5)
    thread.join()
    channel.close()
    listener.close()
    return found[0]


def test_whoever_lacks_the_token_or_is_of_another_start_is_hung_up_on() -> None:
    assert visited("guess", 3) is None
    assert visited("secret", 2) is None
    visit = visited("secret", 3)
    assert visit is not None
    assert visit[1] == 7
    visit[0].close()


def test_nobody_listening_is_a_lost_peer() -> None:
    listener = listen(local=True)
    host, port = listener.getsockname()
    listener.close()
    with pytest.raises(PeerLost, match=r"server 0 at .* cannot be reached"):
        connect(host, port, hello=Hello("", 0, 0), peer="server 0", seconds=2)


def test_a_large_message_needs_no_copy_of_both_sides_in_step() -> None:
    listener = listen(local=True)
    one = Channel(socket.create_connection(listener.getsockname()), "there")
    other = Channel(listener.accept()[0], "here")
    sent: Tensor = torch.arange(2**20)
    thread = threading.Thread(target=one.send, args=("big", {}, [sent]))
    thread.start()
    assert torch.equal(other.receive().tensors[0], sent)
    thread.join()
    for closed in (one, other, listener):
        closed.close()
