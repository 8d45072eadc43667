"""Whether a manifest makes sense, before a single byte is allocated or read on its word.

A CRC-32 tells accidents, not malice: a crafted manifest has a right one. So names of files cannot
leave the directory, chunks tile their file and their tensor exactly, and sizes follow from shapes.
"""

from __future__ import annotations

import math
import re

from shoal.checkpoint.files.manifest import Chunk, Manifest, TensorEntry
from shoal.checkpoint.files.raw import DTYPES, is_dense
from shoal.checkpoint.tree import unflatten

DATA_FILE = re.compile(r"rank-\d{5,}-[0-9a-f]{16}\.bin")


def audit(manifest: Manifest) -> None:
    """Check everything that can be checked without the data files.

    Raises:
        ValueError: with what is wrong, and in which tensor.
    """
    _need(manifest.size == len(manifest.ranks) >= 1, "the number of workers does not add up")
    for file in manifest.files:
        _need(DATA_FILE.fullmatch(file) is not None, f"{file!r} cannot name a data file")
    for name, entry in manifest.tensors.items():
        try:
            _audit_entry(entry, manifest.files)
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from None
    _audit_files(manifest)
    _audit_names(manifest)


def _audit_entry(entry: TensorEntry, files: dict[str, int]) -> None:
    _need(entry.dtype in DTYPES, f"unknown dtype {entry.dtype!r}")
    _need(math.prod(max(size, 1) for size in entry.shape) < 1 << 62, "too large for any machine")
    for chunk in entry.chunks:
        _audit_chunk(chunk, entry)
        _need(chunk.file in files, f"its file {chunk.file!r} is not in the list")
    volume = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    _need(bool(entry.chunks) and volume == math.prod(entry.shape), "chunks do not fill it")
    _need(not _overlap(entry.chunks), "chunks overlap")


def _audit_chunk(chunk: Chunk, entry: TensorEntry) -> None:
    dims = len(entry.shape)
    lengths = {len(chunk.offsets), len(chunk.sizes), len(chunk.stride)}
    _need(lengths == {dims}, f"a chunk does not have {dims} dimensions")
    for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True):
        _need(offset + size <= whole, f"a chunk lies outside of shape {entry.shape}")
    nbytes = math.prod(chunk.sizes) * DTYPES[entry.dtype].itemsize
    _need(chunk.nbytes == nbytes, f"a chunk has {chunk.nbytes} bytes, its sizes make {nbytes}")
    _need(is_dense(chunk.sizes, chunk.stride), "strides leave gaps")


def _overlap(chunks: tuple[Chunk, ...]) -> bool:
    """Whether two boxes meet; a sweep, since pairs of a thousand shards are many."""
    if len(chunks) < 2 or not chunks[0].sizes:
        return False
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    dims = range(len(chunks[0].sizes))
    along = max(dims, key=lambda d: len({chunk.offsets[d] for chunk in filled}))
    active: list[Chunk] = []
    for chunk in sorted(filled, key=lambda c: c.offsets[along]):
        start = chunk.offsets[along]
        active = [other for other in active if other.offsets[along] + other.sizes[along] > start]
        active.append(chunk)
        if any(_meet(chunk, other) for other in active[:-1]):
            return True
    return False


def _meet(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _audit_files(manifest: Manifest) -> None:
    ends = dict.fromkeys(manifest.files, 0)
    for name, chunk in sorted(manifest.chunks(), key=lambda pair: (pair[1].at, pair[1].nbytes)):
        _need(chunk.at == ends[chunk.file], f"tensor {name}: overlap or gap in {chunk.file}")
        ends[chunk.file] += chunk.nbytes
    for file, nbytes in manifest.files.items():
        _need(ends[file] == nbytes, f"{file}: {nbytes} bytes, tensors have {ends[file]}")


def _audit_names(manifest: Manifest) -> None:
    for name, target in manifest.alias.items():
        _need(name not in manifest.tensors, f"tensor {name} is saved and tied at once")
        _need(target in manifest.tensors, f"tensor {name} is tied to {target}, which is absent")
    for tree in (manifest.shared, *manifest.ranks, manifest.meta):
        try:
            found = unflatten(tree, manifest.entry)
        except KeyError as error:
            raise ValueError(f"tensor {error} is absent") from None
        _need(isinstance(found, dict), "a part is not a dict")


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)
