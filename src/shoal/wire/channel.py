"""Tensors over a socket: a small JSON header, then raw bytes. Nothing received is ever executed.

::

    magic (4) | header length (4, big endian) | header (JSON) | bytes of tensor 0 | tensor 1 | ...

Whoever connects says hello with the run's token, its generation and its number, or is hung up on.
"""

from __future__ import annotations

import ctypes
import hmac
import json
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import PeerLost

MAGIC = b"SHL1"
LONGEST_HEADER = 64 * 2**20
LARGEST = 2**36  # bytes of one tensor
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


class Message(NamedTuple):
    """What came: its kind, facts, and tensors."""

    kind: str
    facts: dict[str, Any]
    tensors: list[Tensor]


class Hello(NamedTuple):
    """Who connects."""

    token: str
    generation: int
    worker: int


class Channel:
    """One connection, on which messages go both ways. Sends are atomic; one reader at a time.

    Args:
        connection: a connected TCP socket.
        peer: what to call the other side in errors.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lock = threading.Lock()
        self.peer = peer

    def send(
        self, kind: str, facts: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> None:
        """Send one message."""
        flat = [t.detach().cpu().contiguous() for t in tensors]
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in flat]
        header = json.dumps({"kind": kind, "facts": facts or {}, "tensors": shapes}).encode()
        try:
            with self._lock:
                self._socket.sendall(MAGIC + struct.pack(">I", len(header)) + header)
                for tensor in flat:
                    if nbytes := tensor.numel() * tensor.element_size():
                        self._socket.sendall(_bytes_of(tensor, nbytes))
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone: {error}") from error

    def receive(self) -> Message:
        """Wait for one message."""
        start = self._exactly(8)
        if start[:4] != MAGIC:
            raise PeerLost(f"{self.peer} does not speak our language")
        (length,) = struct.unpack(">I", start[4:])
        if length > LONGEST_HEADER:
            raise PeerLost(f"{self.peer} sent a header of {length} bytes: refused")
        header = _parsed(bytes(self._exactly(length)), self.peer)
        tensors = [self._tensor(dtype, shape) for dtype, shape in header["tensors"]]
        return Message(header["kind"], header["facts"], tensors)

    def _tensor(self, dtype: str, shape: list[int]) -> Tensor:
        kind = DTYPES.get(dtype)
        sound = kind is not None and all(isinstance(n, int) and 0 <= n < 2**40 for n in shape)
        if kind is None or not sound:
            raise PeerLost(f"{self.peer} sent a tensor of {dtype} {shape}: refused")
        numel = torch.Size(shape).numel()
        nbytes = numel * torch.empty((), dtype=kind).element_size()
        if nbytes > LARGEST:
            raise PeerLost(f"{self.peer} sent a tensor of {nbytes} bytes: refused")
        if nbytes == 0:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._exactly(nbytes), dtype=kind).view(shape)

    def _exactly(self, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        while view:
            try:
                got = self._socket.recv_into(view)
            except OSError as error:
                raise PeerLost(f"{self.peer} is gone: {error}") from error
            if got == 0:
                raise PeerLost(f"{self.peer} hung up")
            view = view[got:]
        return buffer

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def connect(host: str, port: int, *, hello: Hello, peer: str, seconds: float) -> Channel:
    """Connect and introduce oneself."""
    try:
        connection = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise PeerLost(f"{peer} at {host}:{port} cannot be reached: {error}") from error
    connection.settimeout(seconds)
    channel = Channel(connection, peer)
    channel.send("hello", hello._asdict())
    return channel


def listen(local: bool) -> socket.socket:
    """A listening socket: on loopback when everybody is on this host."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1" if local else "", 0))
    listener.listen(1024)
    return listener


def accept(listener: socket.socket, *, token: str, generation: int) -> tuple[Channel, int] | None:
    """The next visitor, if it is one of ours."""
    connection, address = listener.accept()
    connection.settimeout(10)  # to say hello
    channel = Channel(connection, f"visitor {address[0]}")
    try:
        message = channel.receive()
        hello = Hello(**message.facts)
    except (PeerLost, TypeError):
        channel.close()
        return None
    told = hmac.compare_digest(str(hello.token).encode(), token.encode())
    if message.kind != "hello" or not told or hello.generation != generation:
        channel.close()
        return None
    connection.settimeout(None)
    channel.peer = f"rank {hello.worker}"
    return channel, int(hello.worker)


def _bytes_of(tensor: Tensor, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def _parsed(text: bytes, peer: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
        if {"kind", "facts", "tensors"} <= set(header):
            return dict(header)
    except (ValueError, TypeError, RecursionError):
        pass
    raise PeerLost(f"{peer} sent a header that cannot be read")
