"""Send messages with tensors over a TCP socket, as a JSON header and raw bytes, without pickle.

::

    magic (4) | header length (4, big endian) | header (JSON) | bytes of tensor 0 | tensor 1 | ...

The first message of a client is the hello. It holds the token of the run, the generation and the
worker's number. If the token or the generation is wrong, the server closes the connection. A hello
has a small size limit and a short timeout, and each client has a thread of its own, so that a
client that does not authenticate cannot delay other clients.
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
MAX_HEADER_BYTES = 64 * 2**20
MAX_HELLO_BYTES = 4096
MAX_TENSOR_BYTES = 2**36
HELLO_SECONDS = 10.0
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


class Message(NamedTuple):
    """One message: its kind, values that JSON can express (``facts``), and tensors."""

    kind: str
    facts: dict[str, Any]
    tensors: list[Tensor]


class Hello(NamedTuple):
    """The first message of a client: the token of the run, its generation and the worker number."""

    token: str
    generation: int
    worker: int


class Channel:
    """Sends and receives messages over a TCP socket. ``peer`` names the other side in errors.

    Several threads may send at the same time, but only one thread may receive.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lock = threading.Lock()
        self.peer = peer

    def send(
        self, kind: str, facts: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> None:
        """Send one message, and block until the operating system has taken all of its bytes."""
        flat = [t.detach().cpu().contiguous() for t in tensors]
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in flat]
        header = json.dumps({"kind": kind, "facts": facts or {}, "tensors": shapes}).encode()
        try:
            with self._lock:
                self._socket.sendall(MAGIC + struct.pack(">I", len(header)) + header)
                for tensor in flat:
                    if nbytes := tensor.numel() * tensor.element_size():
                        raw = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
                        self._socket.sendall(raw)
        except OSError as error:
            raise self._fault(error, "did not accept a message within") from error

    def receive(self) -> Message:
        """Block until one message has arrived, and return it."""
        kind, facts, layouts = self._header(MAX_HEADER_BYTES)
        return Message(kind, facts, [self._tensor(dtype, shape) for dtype, shape in layouts])

    def receive_hello(self, seconds: float) -> Hello:
        """Return the hello, or raise PeerLost if the message that arrives is not a valid hello.

        The hello must arrive within ``seconds``.
        """
        kind, facts, layouts = self._header(MAX_HELLO_BYTES, time.monotonic() + seconds)
        values = tuple(facts.get(name) for name in Hello._fields)
        if kind != "hello" or layouts or not all(map(isinstance, values, (str, int, int))):
            raise PeerLost(f"{self.peer} did not begin with a valid hello message")
        return Hello(*values)  # type: ignore[arg-type]  # types were checked above

    def _header(
        self, max_bytes: int, end: float | None = None
    ) -> tuple[str, dict[str, Any], list[tuple[str, list[int]]]]:
        start = self._read(8, end)
        if start[:4] != MAGIC:
            raise PeerLost(f"{self.peer} does not use Shoal's protocol")
        (length,) = struct.unpack(">I", start[4:])
        if length > max_bytes:
            raise PeerLost(f"{self.peer} sent a header of {length} bytes, over {max_bytes}")
        text = bytes(self._read(length, end))
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            header = json.loads(text)
            kind, facts = header["kind"], header["facts"]
            layouts = [(dtype, shape) for dtype, shape in header["tensors"]]
            valid = all(isinstance(d, str) and isinstance(s, list) for d, s in layouts)
            if isinstance(kind, str) and isinstance(facts, dict) and valid:
                return kind, facts, layouts
        raise PeerLost(f"{self.peer} sent a header that cannot be read")

    def _tensor(self, dtype: str, shape: list[int]) -> Tensor:
        kind = DTYPES.get(dtype)
        if kind is None or not all(isinstance(n, int) and 0 <= n < 2**40 for n in shape):
            raise PeerLost(f"{self.peer} sent a tensor of invalid dtype or shape: {dtype} {shape}")
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes > MAX_TENSOR_BYTES:
            raise PeerLost(f"{self.peer} sent a tensor of {nbytes} bytes, over {MAX_TENSOR_BYTES}")
        if nbytes == 0:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._read(nbytes), dtype=kind).view(shape)

    def _read(self, nbytes: int, end: float | None = None) -> bytearray:
        """Read exactly ``nbytes`` before the time ``end``. None means the socket's own timeout."""
        buffer = bytearray(nbytes)
        view = memoryview(buffer)
        while view:
            try:
                if end is not None:
                    self._socket.settimeout(max(1e-3, end - time.monotonic()))
                received = self._socket.recv_into(view)
            except OSError as error:
                raise self._fault(error, "sent nothing for") from error
            if received == 0:
                raise PeerLost(f"{self.peer} closed the connection")
            view = view[received:]
        return buffer

    def _fault(self, error: OSError, timeout_text: str) -> FaultError:
        if isinstance(error, TimeoutError):  # the peer may only be slow
            seconds = self._socket.gettimeout() or 0.0
            return ExchangeTimeout(f"{self.peer} {timeout_text} {seconds:g} s")
        return PeerLost(f"the connection to {self.peer} is lost: {error}")

    def close(self) -> None:
        """Close the connection. A thread that waits in :meth:`receive` gets PeerLost."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(host: str, port: int, *, hello: Hello, peer: str, seconds: float) -> Channel:
    """Connect to a listener, send the hello, and return the channel.

    ``seconds`` is the timeout of connecting, and later of each send or receive on the channel.
    """
    try:
        connection = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise PeerLost(f"{peer} at {host}:{port} cannot be reached: {error}") from error
    connection.settimeout(seconds)
    channel = Channel(connection, peer)
    channel.send("hello", hello._asdict())
    return channel


def listen(local: bool) -> socket.socket:
    """Return a socket that listens on a free port, only on the loopback interface if ``local``."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1" if local else "", 0))
    listener.listen(1024)
    return listener


def accept_loop(
    listener: socket.socket, handle: Callable[[Channel, int], None], *, token: str, generation: int
) -> None:
    """Accept clients until the listener closes. Each is handled in a thread of its own.

    ``handle`` is called with the channel and the worker number of each client whose hello has this
    token and generation.
    """

    def authenticate_and_handle(connection: socket.socket, host: str) -> None:
        if client := authenticate(connection, host, token=token, generation=generation):
            handle(*client)

    with suppress(OSError):  # raised when the listener closes
        while True:
            connection, (host, *_) = listener.accept()
            client = connection, str(host)
            threading.Thread(target=authenticate_and_handle, args=client, daemon=True).start()


def authenticate(
    connection: socket.socket, host: str, *, token: str, generation: int
) -> tuple[Channel, int] | None:
    """Return the client's channel and worker number, or close and return None on a wrong hello."""
    channel = Channel(connection, f"client {host}")
    with suppress(FaultError):
        hello = channel.receive_hello(HELLO_SECONDS)
        same_token = hmac.compare_digest(hello.token.encode(errors="replace"), token.encode())
        if same_token and hello.generation == generation:
            connection.settimeout(None)
            channel.peer = f"rank {hello.worker}"
            return channel, hello.worker
    channel.close()
    return None


def close_listener(listener: socket.socket) -> None:
    """Close a listener and end its :func:`accept_loop`, which ``close`` alone would not wake."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
