"""The manifest: which tensors a checkpoint has, and where in the data files their bytes are.

The manifest is one JSON object. Its first entry is the CRC-32 of all bytes after this entry, so
that any flipped bit in the file is detected.

A CRC-32 detects accidents, not attacks: a forged manifest can have a correct CRC-32. So before any
tensor is allocated or read, :func:`check` ensures that file names do not lead out of the directory,
that chunks cover their file and tensor without gap or overlap, and that their sizes are right.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.checkpoint.files.raw import DTYPES, is_dense
from shoal.checkpoint.tree import unflatten

FORMAT = "shoal-checkpoint"
VERSION = 1
NAME = "manifest.json"
DATA_FILE = re.compile(r"rank-\d{5,}-[0-9a-f]{16}\.bin")
_HEAD = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor: its position in the tensor and in a data file."""

    file: str
    at: int  # position of its first byte in the file
    nbytes: int
    crc32: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]  # strides of the values in the file, in elements, without gaps


@dataclass(frozen=True)
class TensorEntry:
    """One tensor and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint except the bytes of its tensors.

    ``size`` is the number of workers that saved it. ``alias`` maps the name of a tied tensor to the
    name whose tensor was saved. ``shared``, ``ranks`` (one for each worker) and ``meta`` are trees
    of :mod:`shoal.checkpoint.tree`.
    """

    step: int
    size: int
    files: dict[str, int]  # name to nbytes
    tensors: dict[str, TensorEntry]
    alias: dict[str, str] = field(default_factory=dict)
    shared: Any = None
    ranks: tuple[Any, ...] = ()
    meta: Any = None
    written: str = ""  # time of the save, for people who read the file; Shoal does not use it

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of tensor ``name``, or of the tensor to which it is tied."""
        return self.tensors[self.alias.get(name, name)]

    def chunks(self) -> Iterable[tuple[str, Chunk]]:
        """Return every chunk with the name of its tensor."""
        return ((name, chunk) for name, entry in self.tensors.items() for chunk in entry.chunks)


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    rest = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()[1:]
    return b'{"crc32":"%08x",' % zlib.crc32(rest) + rest


def decode(raw: bytes) -> Manifest:
    """Return the manifest that these bytes encode, after checking it.

    Raises:
        ValueError: the bytes are not a valid manifest; the message says why.
    """
    head = _HEAD.match(raw)
    if head is None:
        raise ValueError("it is not a Shoal manifest")
    crc = b"%08x" % zlib.crc32(raw[head.end() :])
    if crc != head[1]:
        raise ValueError(f"its CRC-32 is {crc.decode()}, but {head[1].decode()} was written")
    try:
        body = json.loads(
            raw, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite
        )
        manifest = _build(body)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except KeyError as error:
        raise ValueError(f"it has no key {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"it has a value of a wrong type: {error}") from None
    check(manifest)
    return manifest


def _build(body: dict[str, Any]) -> Manifest:
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']!r}, not {FORMAT!r}")
    if body["version"] != VERSION:
        raise ValueError(f"its version is {body['version']!r}; this Shoal reads {VERSION}")
    return Manifest(
        step=_natural(body["step"]),
        size=_natural(body["size"]),
        files={str(name): _natural(nbytes) for name, nbytes in body["files"].items()},
        tensors={str(name): _entry(entry) for name, entry in body["tensors"].items()},
        alias={str(name): str(target) for name, target in body["alias"].items()},
        shared=body["shared"],
        ranks=tuple(body["ranks"]),
        meta=body["meta"],
        written=str(body["written"]),
    )


def _entry(entry: dict[str, Any]) -> TensorEntry:
    chunks = tuple(map(chunk_of, entry["chunks"]))
    return TensorEntry(str(entry["dtype"]), _naturals(entry["shape"]), chunks)


def chunk_of(chunk: dict[str, Any]) -> Chunk:
    """Return the chunk of this JSON object."""
    at, nbytes, crc32 = (_natural(chunk[key]) for key in ("at", "nbytes", "crc32"))
    offsets, sizes, stride = (_naturals(chunk[key]) for key in ("offsets", "sizes", "stride"))
    return Chunk(str(chunk["file"]), at, nbytes, crc32, offsets, sizes, stride)


def _natural(value: Any) -> int:
    # Values are below 2**62, so that the sum of two fits into 64-bit sizes of torch and kernel.
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]!r} is not a size or an offset")
    return value


def _naturals(values: Any) -> tuple[int, ...]:
    return tuple(_natural(value) for value in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(unique := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return unique


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def check(manifest: Manifest) -> None:
    """Check what can be checked without the data files.

    Raises:
        ValueError: the manifest is invalid. The message says why, and may name a tensor.
    """
    ranks = len(manifest.ranks)
    _require(manifest.size == ranks >= 1, f"size is {manifest.size}, but it has {ranks} ranks")
    for file in manifest.files:
        _require(DATA_FILE.fullmatch(file) is not None, f"{file!r} cannot be a data file")
    for name, entry in manifest.tensors.items():
        try:
            _check_entry(entry, manifest.files)
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from None
    _check_files(manifest)
    _check_names(manifest)


def _check_entry(entry: TensorEntry, files: dict[str, int]) -> None:
    _require(entry.dtype in DTYPES, f"unknown dtype {entry.dtype!r}")
    _require(math.prod(max(size, 1) for size in entry.shape) < 1 << 62, "its shape is too large")
    for chunk in entry.chunks:
        _check_chunk(chunk, entry)
        _require(chunk.file in files, f"its file {chunk.file!r} is not in the list of files")
    volume = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    _require(bool(entry.chunks) and volume == math.prod(entry.shape), "its chunks do not fill it")
    _require(not _overlap(entry.chunks), "its chunks overlap")


def _check_chunk(chunk: Chunk, entry: TensorEntry) -> None:
    dims = len(entry.shape)
    lengths = {len(chunk.offsets), len(chunk.sizes), len(chunk.stride)}
    _require(lengths == {dims}, f"a chunk does not have {dims} dimensions")
    for offset, size, length in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True):
        _require(offset + size <= length, f"a chunk is outside of shape {entry.shape}")
    nbytes = math.prod(chunk.sizes) * DTYPES[entry.dtype].itemsize
    _require(chunk.nbytes == nbytes, f"a chunk has {chunk.nbytes} bytes, but needs {nbytes}")
    _require(is_dense(chunk.sizes, chunk.stride), "the strides of a chunk leave gaps")


def _overlap(chunks: tuple[Chunk, ...]) -> bool:
    """Return whether two chunks overlap.

    Chunks are sorted along one dimension, because comparing all pairs of a thousand would be slow.
    """
    if len(chunks) < 2 or not chunks[0].sizes:
        return False
    nonempty = [chunk for chunk in chunks if 0 not in chunk.sizes]
    dims = range(len(chunks[0].sizes))
    along = max(dims, key=lambda d: len({chunk.offsets[d] for chunk in nonempty}))
    active: list[Chunk] = []
    for chunk in sorted(nonempty, key=lambda c: c.offsets[along]):
        start = chunk.offsets[along]
        active = [other for other in active if other.offsets[along] + other.sizes[along] > start]
        if any(_intersect(chunk, other) for other in active):
            return True
        active.append(chunk)
    return False


def _intersect(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _check_files(manifest: Manifest) -> None:
    ends = dict.fromkeys(manifest.files, 0)
    for name, chunk in sorted(manifest.chunks(), key=lambda pair: (pair[1].at, pair[1].nbytes)):
        why = f"tensor {name}: {chunk.file} has a gap or an overlap before byte {chunk.at}"
        _require(chunk.at == ends[chunk.file], why)
        ends[chunk.file] += chunk.nbytes
    for file, nbytes in manifest.files.items():
        _require(ends[file] == nbytes, f"{file} has {nbytes} bytes, its tensors {ends[file]}")


def _check_names(manifest: Manifest) -> None:
    for name, target in manifest.alias.items():
        _require(name not in manifest.tensors, f"tensor {name} is both saved and tied")
        _require(target in manifest.tensors, f"tensor {name} is tied to {target}, which is absent")
    for tree in (manifest.shared, *manifest.ranks, manifest.meta):
        try:
            part = unflatten(tree, manifest.entry)
        except KeyError as error:
            raise ValueError(f"tensor {error} is absent") from None
        _require(isinstance(part, dict), "shared, meta or a rank's own state is not a dict")


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)
