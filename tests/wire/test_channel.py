"""Tensors over a socket: what goes in comes out; what is not ours is refused, never executed."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from shoal.errors import ExchangeTimeout, PeerLost
from shoal.wire import channel as channels
from shoal.wire.channel import (
    DTYPES,
    MAGIC,
    Channel,
    Hello,
    accept_loop,
    authenticate,
    close_listener,
    connect,
    listen,
)


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


def header(content: object) -> bytes:
    text = json.dumps(content).encode()
    return MAGIC + struct.pack(">I", len(text)) + text


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_numbers_of_every_type_arrive_as_they_were(
    name: str, ends: tuple[Channel, Channel]
) -> None:
    here, there = ends
    sent = [torch.arange(6).to(DTYPES[name]).view(2, 3).T, torch.ones((), dtype=DTYPES[name])]
    sent.append(torch.empty(0, 4, dtype=DTYPES[name]))
    here.send("kind", {"fact": 1}, sent)
    message = there.receive()
    assert (message.kind, message.facts) == ("kind", {"fact": 1})
    for mine, theirs in zip(sent, message.tensors, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + struct.pack(">I", 2**31),
        header("text"),
        header({"kind": "x"}),
        header({"kind": "x", "facts": [], "tensors": []}),
        header({"kind": "x", "facts": {}, "tensors": [[1]]}),
        header({"kind": "x", "facts": {}, "tensors": [[["float32"], [1]]]}),
        header({"kind": "x", "facts": {}, "tensors": [["float32", 1]]}),
        header({"kind": "x", "facts": {}, "tensors": [["uint8", [2**39, 2**39]]]}),
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


HELLO = {"token": "secret", "generation": 3, "worker": 7}
Visits = list[tuple[Channel, int]]


@pytest.fixture
def door() -> Iterator[tuple[tuple[str, int], Visits, threading.Event]]:
    """Where to connect, who was let in, and a bell that rings when somebody is."""
    listener, visits, bell = listen(local=True), Visits(), threading.Event()

    def handle(channel: Channel, worker: int) -> None:
        visits.append((channel, worker))
        bell.set()

    thread = threading.Thread(
        target=accept_loop, args=(listener, handle), kwargs={"token": "secret", "generation": 3}
    )
    thread.start()
    yield listener.getsockname(), visits, bell
    close_listener(listener)
    thread.join()
    for channel, _ in visits:
        channel.close()


def visited(token: str, generation: int) -> tuple[Channel, int] | None:
    listener = listen(local=True)
    host, port = listener.getsockname()
    hello = Hello(token, generation, 7)
    channel = connect(host, port, hello=hello, peer="server 0", seconds=5)
    visit = authenticate(listener.accept()[0], host, token="secret", generation=3)
    channel.close()
    listener.close()
    return visit


def test_whoever_lacks_the_token_or_is_of_another_start_is_refused() -> None:
    assert visited("guess", 3) is None
    assert visited("secret", 2) is None
    visit = visited("secret", 3)
    assert visit is not None
    assert visit[1] == 7
    visit[0].close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + struct.pack(">I", channels.MAX_HELLO_BYTES + 1),
        header({"kind": "hello", "facts": HELLO, "tensors": [[1]]}),
        header({"kind": "hello", "facts": HELLO, "tensors": [["uint8", [2**35]]]}),
        header({"kind": "ask", "facts": HELLO, "tensors": []}),
        header({"kind": "hello", "facts": {**HELLO, "worker": "x"}, "tensors": []}),
        header({"kind": "hello", "facts": {**HELLO, "token": "\ud800"}, "tensors": []}),
        header({"kind": "hello", "facts": {**HELLO, "token": None}, "tensors": []}),
        header({"kind": "hello", "facts": {}, "tensors": []}),
    ],
)
def test_a_stranger_is_refused_and_the_next_is_let_in(
    sent: bytes, door: tuple[tuple[str, int], Visits, threading.Event]
) -> None:
    where, visits, bell = door
    with socket.create_connection(where, timeout=10) as stranger:
        stranger.sendall(sent)
        with suppress(ConnectionResetError):  # closed before all was read
            assert stranger.recv(1) == b""
    ours = connect(*where, hello=Hello(**HELLO), peer="server 0", seconds=5)
    assert bell.wait(10)
    assert [worker for _, worker in visits] == [7]
    ours.close()


def test_a_silent_client_keeps_nobody_waiting(
    door: tuple[tuple[str, int], Visits, threading.Event],
) -> None:
    where, _, bell = door
    with socket.create_connection(where) as silent:
        silent.sendall(MAGIC)
        ours = connect(*where, hello=Hello(**HELLO), peer="server 0", seconds=5)
        assert bell.wait(10)
    ours.close()


def test_a_hello_has_one_deadline_however_it_trickles_in() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    over = threading.Event()

    def trickle() -> None:
        for byte in header({"kind": "hello", "facts": HELLO, "tensors": []}):
            if over.wait(0.05):
                return
            here.sendall(bytes([byte]))

    channel = Channel.__new__(Channel)  # a socket pair has no TCP_NODELAY
    channel._socket, channel.peer = there, "client"
    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(ExchangeTimeout, match="client sent nothing"):
        channel.receive_hello(0.3)
    over.set()
    thread.join()
    here.close()
    there.close()


def test_a_silent_server_is_late_and_not_gone(ends: tuple[Channel, Channel]) -> None:
    here, _ = ends
    here._socket.settimeout(0.05)
    with pytest.raises(ExchangeTimeout, match=r"rank 0 sent nothing for 0\.05 s"):
        here.receive()
    with pytest.raises(ExchangeTimeout, match="rank 0 did not accept a message"):
        here.send("big", {}, [torch.zeros(2**24)])


def test_closing_wakes_a_thread_that_still_reads(ends: tuple[Channel, Channel]) -> None:
    here, _ = ends
    caught: list[PeerLost] = []

    def read() -> None:
        try:
            here.receive()
        except PeerLost as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    here.close()
    thread.join(10)
    assert len(caught) == 1


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
