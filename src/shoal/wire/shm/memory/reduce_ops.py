"""Reduce operations, which combine the tensors of all ranks, always in the order of ranks.

Every rank and every run computes ``((x0 + x1) + x2) + x3``, so results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import BadArgument

Combine = Callable[..., Tensor]
_SERIAL = 32704  # for more elements torch uses several threads, but other ranks need the cores

_KINDS: Any = dist.ReduceOp.RedOpType
# Keys are hashes of torch's operations, because comparing two operations takes microseconds.
# Values are the name, the torch function, and the torch function for bool.
_TORCH: dict[int, tuple[str, Combine, Combine]] = {
    hash(_KINDS.SUM): ("sum", torch.add, torch.logical_or),
    hash(_KINDS.AVG): ("avg", torch.add, torch.logical_or),
    hash(_KINDS.PRODUCT): ("product", torch.mul, torch.logical_and),
    hash(_KINDS.MIN): ("min", torch.minimum, torch.logical_and),
    hash(_KINDS.MAX): ("max", torch.maximum, torch.logical_or),
    hash(_KINDS.BAND): ("band", torch.bitwise_and, torch.logical_and),
    hash(_KINDS.BOR): ("bor", torch.bitwise_or, torch.logical_or),
    hash(_KINDS.BXOR): ("bxor", torch.bitwise_xor, torch.logical_xor),
}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Reduction(NamedTuple):
    """How to combine tensors of one dtype."""

    name: str
    combine: Combine  # a torch function of two tensors and ``out=``
    divides: bool  # whether to divide the sum by the number of ranks
    widens: bool  # whether to compute in float32, because torch cannot combine the dtype

    def __call__(self, out: Tensor, sources: Sequence[Tensor]) -> None:
        """Combine ``sources`` into ``out``, which may also be the first or second source."""
        for piece, *parts in _blocks(out, sources):
            self._block(piece, parts)

    def prepare(self, out: Tensor, sources: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that combines these tensors and can be called again and again."""
        if self.widens or len(sources) == 1:
            return partial(self.__call__, out, sources)
        blocks = list(_blocks(out, sources))
        steps = [step for piece, *parts in blocks for step in _steps(piece, parts)]
        averaged = [piece for piece, *_ in blocks] if self.divides else []
        return partial(_run, self.combine, steps, averaged, len(sources))

    def _block(self, out: Tensor, sources: Sequence[Tensor]) -> None:
        if self.widens:
            wide = torch.empty(out.shape, dtype=torch.float32)
            self._replace(widens=False)._block(wide, [source.float() for source in sources])
            out.copy_(wide)
            return
        if len(sources) == 1:
            out.copy_(sources[0])
        for first, second, into in _steps(out, sources):
            self.combine(first, second, out=into)
        if self.divides:
            out.div_(len(sources))


def _steps(out: Tensor, sources: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the arguments (first, second, out) of each operation, in the order of ranks."""
    first = sources[0]
    for second in sources[1:]:
        yield first, second, out
        first = out


def _run(
    combine: Combine, steps: Sequence[Sequence[Tensor]], averaged: Sequence[Tensor], count: int
) -> None:
    for first, second, out in steps:
        combine(first, second, out=out)
    for out in averaged:
        out.div_(count)


def _blocks(out: Tensor, sources: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Return pieces of ``out`` and of each source, so short that torch uses one thread."""
    if out.numel() <= _SERIAL or torch.get_num_threads() == 1:
        return ((out, *sources),)
    return zip(*(x.split(_SERIAL) for x in (out, *sources)), strict=True)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=256)
def reduction(kind: int, dtype: torch.dtype) -> Reduction:
    """Return the reduction for a dtype. ``kind`` is the hash of torch's operation.

    Raises:
        BadArgument: the operation is unknown, or is not possible with this dtype.
    """
    entry = _TORCH.get(kind)
    names = {int(each): name for name, each in _KINDS.__members__.items()}
    call = f"reduce op {names.get(kind, kind)} of {dtype}"
    if entry is None:
        raise BadArgument(call, "the shoal backend has no such operation; use sum or avg")
    name, combine, logical = entry
    real = dtype.is_floating_point or dtype.is_complex
    if name in ("band", "bor", "bxor") and real:
        raise BadArgument(call, "bitwise operations are possible only for integers and bool")
    if name in ("min", "max") and dtype.is_complex:
        raise BadArgument(call, "complex numbers have no order; use view_as_real")
    if name == "avg" and not real:
        raise BadArgument(call, "the mean of integers is not an integer; sum, then divide")
    if dtype in _SIGNED:
        if name in ("min", "max"):
            raise BadArgument(call, "torch cannot order this dtype; convert to a signed one")
        combine = partial(_as_signed, combine, _SIGNED[dtype])
    widens = dtype.is_floating_point and dtype.itemsize == 1
    return Reduction(name, logical if dtype == torch.bool else combine, name == "avg", widens)


def _as_signed(
    combine: Combine, signed: torch.dtype, first: Tensor, second: Tensor, *, out: Tensor
) -> Tensor:
    """Combine unsigned tensors as signed ones, which gives equal bits except for min and max."""
    return combine(first.view(signed), second.view(signed), out=out.view(signed))
