"""Tensors over a socket: a small JSON header, then raw bytes. Nothing received is ever executed.

::

    magic (4) | header length (4, big endian) | header (JSON) | bytes of tensor 0 | tensor 1 | ...

Whoever connects says hello with the run's token, its generation and its number, or is hung up on.
Until it has, it may send little and has little time, and nobody else waits for it.
"""

from __future__ import annotations

import ctypes
import hmac
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ExchangeTimeout, FaultError, PeerLost

MAGIC = b"SHL1"
LONGEST_HEADER = 64 * 2**20
LONGEST_HELLO = 4096
HELLO_SECONDS = 10.0
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
            raise self._fault(error, "took nothing") from error

    def receive(self) -> Message:
        """Wait for one message."""
        kind, facts, like = self._header(LONGEST_HEADER)
        return Message(kind, facts, [self._tensor(*one) for one in like])

    def receive_hello(self, seconds: float) -> Hello:
        """Wait so long, in all, for a stranger to say who it is; it may send nothing else."""
        kind, facts, like = self._header(LONGEST_HELLO, time.monotonic() + seconds)
        told = tuple(facts.get(name) for name in Hello._fields)
        if kind != "hello" or like or not all(map(isinstance, told, (str, int, int))):
            raise PeerLost(f"{self.peer} did not say hello")
        return Hello(*told)  # type: ignore[arg-type]  # seen just now

    def _header(
        self, longest: int, end: float | None = None
    ) -> tuple[str, dict[str, Any], list[tuple[str, list[int]]]]:
        start = self._exactly(8, end)
        if start[:4] != MAGIC:
            raise PeerLost(f"{self.peer} does not speak our language")
        (length,) = struct.unpack(">I", start[4:])
        if length > longest:
            raise PeerLost(f"{self.peer} sent a header of {length} bytes: refused")
        return _parsed(bytes(self._exactly(length, end)), self.peer)

    def _tensor(self, dtype: str, shape: list[int]) -> Tensor:
        kind = DTYPES.get(dtype)
        sound = kind is not None and all(isinstance(n, int) and 0 <= n < 2**40 for n in shape)
        if kind is None or not sound:
            raise PeerLost(f"{self.peer} sent a tensor of {dtype} {shape}: refused")
        nbytes = math.prod(shape) * torch.empty((), dtype=kind).element_size()
        if nbytes > LARGEST:
            raise PeerLost(f"{self.peer} sent a tensor of {nbytes} bytes: refused")
        if nbytes == 0:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._exactly(nbytes), dtype=kind).view(shape)

    def _exactly(self, nbytes: int, end: float | None = None) -> bytearray:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        while view:
            try:
                if end is not None:
                    self._socket.settimeout(max(1e-3, end - time.monotonic()))
                got = self._socket.recv_into(view)
            except OSError as error:
                raise self._fault(error, "said nothing") from error
            if got == 0:
                raise PeerLost(f"{self.peer} hung up")
            view = view[got:]
        return buffer

    def _fault(self, error: OSError, did: str) -> FaultError:
        if isinstance(error, TimeoutError):  # late, which is not gone
            seconds = self._socket.gettimeout() or 0.0
            return ExchangeTimeout(f"{self.peer} {did} for {seconds:g} s")
        return PeerLost(f"{self.peer} is gone: {error}")

    def close(self) -> None:
        """Hang up, also on a thread of mine that still reads."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
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


def welcome(
    listener: socket.socket,
    attend: Callable[[Channel, int], None],
    *,
    token: str,
    generation: int,
) -> None:
    """Take in visitors until the listener closes; each is greeted, and attended, in a thread."""

    def visit(connection: socket.socket, host: str) -> None:
        greeted = greet(connection, host, token=token, generation=generation)
        if greeted is not None:
            attend(*greeted)

    with suppress(OSError):  # closed
        while True:
            connection, address = listener.accept()
            host = str(address[0])
            threading.Thread(target=visit, args=(connection, host), daemon=True).start()


def greet(
    connection: socket.socket, host: str, *, token: str, generation: int
) -> tuple[Channel, int] | None:
    """A visitor and its number if it is one of ours; else it is hung up on."""
    channel = Channel(connection, f"visitor {host}")
    try:
        hello = channel.receive_hello(HELLO_SECONDS)
    except FaultError:
        channel.close()
        return None
    told = hmac.compare_digest(hello.token.encode(errors="replace"), token.encode())
    if not told or hello.generation != generation:
        channel.close()
        return None
    connection.settimeout(None)
    channel.peer = f"rank {hello.worker}"
    return channel, hello.worker


def shut(listener: socket.socket) -> None:
    """Take in nobody any more; close alone would not wake who waits for a visitor."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _bytes_of(tensor: Tensor, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def _parsed(text: bytes, peer: str) -> tuple[str, dict[str, Any], list[tuple[str, list[int]]]]:
    try:
        header = json.loads(text)
        kind, facts = header["kind"], header["facts"]
        like = [(dtype, shape) for dtype, shape in header["tensors"]]
        pairs = all(isinstance(d, str) and isinstance(s, list) for d, s in like)
        if isinstance(kind, str) and isinstance(facts, dict) and pairs:
            return kind, facts, like
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise PeerLost(f"{peer} sent a header that cannot be read")
