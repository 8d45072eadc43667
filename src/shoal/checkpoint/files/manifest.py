"""The manifest: which tensors a checkpoint holds, and where each byte of them lies.

One JSON object whose first key is the CRC-32 of all bytes after it, so a flipped bit anywhere in
the file is noticed. What is read is believed only after :mod:`shoal.checkpoint.files.audit` agreed.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

FORMAT = "shoal-checkpoint"
VERSION = 1
NAME = "manifest.json"
_HEAD = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')


@dataclass(frozen=True)
class Chunk:
    """One box of a tensor: where it lies in the tensor, and where in which file."""

    file: str
    at: int
    nbytes: int
    crc32: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]  # of the bytes in the file; dense, so channels_last needs no copy


@dataclass(frozen=True)
class TensorEntry:
    """One tensor."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything but the bytes of the tensors.

    ``alias`` maps a tied tensor to the one that was saved. ``shared``, ``ranks`` (one for each
    worker) and ``meta`` are trees of :mod:`shoal.checkpoint.tree`.
    """

    step: int
    size: int
    files: dict[str, int]  # name to nbytes
    tensors: dict[str, TensorEntry]
    alias: dict[str, str] = field(default_factory=dict)
    shared: Any = None
    ranks: tuple[Any, ...] = ()
    meta: Any = None
    written: str = ""  # when, for people; nothing is decided by a clock

    def entry(self, name: str) -> TensorEntry:
        """The tensor of this name, or the one it is tied to."""
        return self.tensors[self.alias.get(name, name)]

    def chunks(self) -> Iterable[tuple[str, Chunk]]:
        """Every chunk, with the name of its tensor."""
        return ((name, chunk) for name, entry in self.tensors.items() for chunk in entry.chunks)


def encode(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    rest = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()[1:]
    return b'{"crc32":"%08x",' % zlib.crc32(rest) + rest


def decode(raw: bytes) -> Manifest:
    """The manifest in these bytes, whole but not yet audited.

    Raises:
        ValueError: they are not what :func:`encode` wrote.
    """
    head = _HEAD.match(raw)
    if head is None:
        raise ValueError("not a Shoal manifest")
    crc = b"%08x" % zlib.crc32(raw[head.end() :])
    if crc != head[1]:
        raise ValueError(f"its CRC-32 is {crc.decode()}, written was {head[1].decode()}")
    try:
        return _build(
            json.loads(
                raw,
                object_pairs_hook=_distinct,
                parse_constant=_refuse_constant,
                parse_float=_finite,
            )
        )
    except RecursionError:
        raise ValueError("nested too deep") from None
    except KeyError as error:
        raise ValueError(f"lacks {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"malformed: {error}") from None


def _build(body: dict[str, Any]) -> Manifest:
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']!r}, not {FORMAT!r}")
    if body["version"] != VERSION:
        raise ValueError(f"version {body['version']!r}, and this Shoal reads version {VERSION}")
    return Manifest(
        step=_whole(body["step"]),
        size=_whole(body["size"]),
        files={str(name): _whole(nbytes) for name, nbytes in body["files"].items()},
        tensors={str(name): _entry(entry) for name, entry in body["tensors"].items()},
        alias={str(name): str(target) for name, target in body["alias"].items()},
        shared=body["shared"],
        ranks=tuple(body["ranks"]),
        meta=body["meta"],
        written=str(body["written"]),
    )


def _entry(entry: dict[str, Any]) -> TensorEntry:
    chunks = tuple(chunk_of(chunk) for chunk in entry["chunks"])
    return TensorEntry(str(entry["dtype"]), _wholes(entry["shape"]), chunks)


def chunk_of(chunk: dict[str, Any]) -> Chunk:
    """A chunk from its JSON form."""
    return Chunk(
        file=str(chunk["file"]),
        at=_whole(chunk["at"]),
        nbytes=_whole(chunk["nbytes"]),
        crc32=_whole(chunk["crc32"]),
        offsets=_wholes(chunk["offsets"]),
        sizes=_wholes(chunk["sizes"]),
        stride=_wholes(chunk["stride"]),
    )


def _whole(value: Any) -> int:
    # 2**62 leaves room to add two of them and stay within what torch and the kernel take
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]!r} is not a size or an offset")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    return tuple(_whole(value) for value in values)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is too large")
    return number
