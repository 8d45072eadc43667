"""Read and write tensors as raw bytes with a CRC-32, without copies where possible."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

SLICE_NBYTES = 8 << 20  # so small that a slice is still in the CPU cache when it is written

_DTYPE_NAMES = """
    bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex32 complex64 complex128
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
"""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES.split()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def why_unsavable(tensor: Tensor) -> str | None:
    """Return why the bytes of ``tensor`` cannot be saved, or None if they can."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}: save its indices and values instead"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"dtype {tensor.dtype} is not supported: dequantize or cast it first"
    return None


def is_dense(sizes: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements fill memory without gap or overlap, in any order of dims."""
    if 0 in sizes:
        return True
    expected = 1
    for step, size in sorted((st, si) for si, st in zip(sizes, stride, strict=True) if si > 1):
        if step != expected:
            return False
        expected *= size
    return True


def dense(tensor: Tensor) -> Tensor:
    """Return the same values on the CPU without gaps. Strides follow ``torch.preserve_format``."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    if is_dense(values.shape, values.stride()):
        return values
    return values.clone(memory_format=torch.preserve_format)


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense tensor, in memory order, without a copy."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(cast(bytearray, flat.view(torch.uint8).numpy()))


def slices(view: memoryview) -> Iterator[memoryview]:
    """Yield consecutive parts of at most ``SLICE_NBYTES``."""
    for start in range(0, len(view), SLICE_NBYTES):
        yield view[start : start + SLICE_NBYTES]


def write_all(fd: int, view: memoryview) -> int:
    """Write all of ``view``; return its CRC-32."""
    crc = 0
    for part in slices(view):
        crc = zlib.crc32(part, crc)
        while part:
            part = part[os.write(fd, part) :]
    return crc


def crc_of(fd: int, offset: int, nbytes: int) -> int:
    """Return the CRC-32 of ``nbytes`` bytes of a file from ``offset`` on.

    Raises:
        EOFError: the file ends earlier.
    """
    crc, end = 0, offset + nbytes
    scratch = memoryview(bytearray(min(nbytes, SLICE_NBYTES)))
    for start in range(offset, end, SLICE_NBYTES):
        crc = read_all(fd, scratch[: end - start], start, crc)
    return crc


def read_all(fd: int, view: memoryview, offset: int, crc: int = 0) -> int:
    """Fill ``view`` with a file's bytes from ``offset`` on; return ``crc`` updated with them.

    Raises:
        EOFError: the file ends earlier.
    """
    for part in slices(view):
        rest = part
        while rest:
            if (count := os.preadv(fd, [rest], offset)) == 0:
                raise EOFError(f"the file ends at byte {offset}")
            offset += count
            rest = rest[count:]
        crc = zlib.crc32(part, crc)
    return crc
