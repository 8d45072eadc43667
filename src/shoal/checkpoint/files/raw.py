"""Tensors as bytes: dense in memory, one CRC-32 each, no copy where none is needed."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

SLICE_NBYTES = 8 << 20  # small enough that CRC and write find it in the cache

_NAMES = """
    bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex32 complex64 complex128
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
"""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def unsavable(tensor: Tensor) -> str | None:
    """Why the bytes of this tensor cannot be saved, if so."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}: save its indices and values instead"
    if tensor.is_meta:
        return "it lies on the meta device and has no values"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"dtype {tensor.dtype} is not supported: dequantize or cast it first"
    return None


def is_dense(sizes: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill memory without gap or overlap, in whatever order."""
    if 0 in sizes:
        return True
    expected = 1
    for step, size in sorted((st, si) for si, st in zip(sizes, stride, strict=True) if si > 1):
        if step != expected:
            return False
        expected *= size
    return True


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(max(size, 1) for size in sizes[i + 1 :]) for i in range(len(sizes)))


def dense(tensor: Tensor) -> Tensor:
    """The same values on the CPU without gaps; strides are kept as ``preserve_format`` does."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    if is_dense(values.shape, values.stride()):
        return values
    return values.clone(memory_format=torch.preserve_format)


def view_bytes(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor, in the order in which it lies."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(cast(bytearray, flat.view(torch.uint8).numpy()))


def slices(view: memoryview) -> Iterator[memoryview]:
    """Consecutive parts of at most ``SLICE_NBYTES``."""
    for start in range(0, len(view), SLICE_NBYTES):
        yield view[start : start + SLICE_NBYTES]


def write_all(fd: int, view: memoryview) -> int:
    """Write everything; return its CRC-32."""
    crc = 0
    for part in slices(view):
        crc = zlib.crc32(part, crc)
        while part:
            part = part[os.write(fd, part) :]
    return crc


def crc_of(fd: int, at: int, nbytes: int) -> int:
    """The CRC-32 of ``nbytes`` from offset ``at``, in little memory.

    Raises:
        EOFError: the file ends before.
    """
    crc, end = 0, at + nbytes
    scratch = memoryview(bytearray(min(nbytes, SLICE_NBYTES)))
    while at < end:
        part = scratch[: end - at]
        count = os.preadv(fd, [part], at)
        if count == 0:
            raise EOFError(f"ends at byte {at}")
        crc = zlib.crc32(part[:count], crc)
        at += count
    return crc


def read_all(fd: int, view: memoryview, at: int) -> int:
    """Fill ``view`` from offset ``at``; return its CRC-32.

    Raises:
        EOFError: the file ends before.
    """
    crc = 0
    for part in slices(view):
        rest = part
        while rest:
            count = os.preadv(fd, [rest], at)
            if count == 0:
                raise EOFError(f"ends at byte {at}")
            at += count
            rest = rest[count:]
        crc = zlib.crc32(part, crc)
    return crc
