"""Combine the ranks' numbers, always in the order of ranks: ``((x0 + x1) + x2) + x3``.

The order is the same on every rank and in every run, so results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import BadArgument

Combine = Callable[..., Tensor]
_SERIAL = 32704  # torch splits what is longer among threads, which the other ranks' cores need

_KINDS: Any = dist.ReduceOp.RedOpType
_TORCH: dict[object, tuple[str, Combine, Combine]] = {
    _KINDS.SUM: ("sum", torch.add, torch.logical_or),
    _KINDS.AVG: ("avg", torch.add, torch.logical_or),
    _KINDS.PRODUCT: ("product", torch.mul, torch.logical_and),
    _KINDS.MIN: ("min", torch.minimum, torch.logical_and),
    _KINDS.MAX: ("max", torch.maximum, torch.logical_or),
    _KINDS.BAND: ("band", torch.bitwise_and, torch.logical_and),
    _KINDS.BOR: ("bor", torch.bitwise_or, torch.logical_or),
    _KINDS.BXOR: ("bxor", torch.bitwise_xor, torch.logical_xor),
}


class Reduction(NamedTuple):
    """How to combine numbers of one type.

    Attributes:
        name: what one calls it.
        combine: two tensors into ``out=``.
        divides: whether the sum is divided by the number of ranks.
        widens: whether torch cannot combine the type itself, so it is done in float32.
    """

    name: str
    combine: Combine
    divides: bool
    widens: bool

    def __call__(self, out: Tensor, sources: Sequence[Tensor]) -> None:
        """Combine ``sources`` into ``out``, which may be the first or second of them, no other."""
        block = out.numel() if torch.get_num_threads() == 1 else _SERIAL
        if out.numel() <= block:
            self._block(out, sources)
            return
        cut = zip(*(x.split(block) for x in (out, *sources)), strict=True)  # type: ignore[no-untyped-call]
        for piece, *parts in cut:
            self._block(piece, parts)

    def _block(self, out: Tensor, sources: Sequence[Tensor]) -> None:
        if self.widens:
            wide = torch.empty(out.shape, dtype=torch.float32)
            narrow = self._replace(widens=False)
            narrow._block(wide, [source.float() for source in sources])
            out.copy_(wide)
            return
        first = sources[0]
        if len(sources) == 1:
            out.copy_(first)
        for source in sources[1:]:
            first = self.combine(first, source, out=out)
        if self.divides:
            out.div_(len(sources))


@lru_cache(maxsize=256)
def reduction(kind: object, dtype: torch.dtype) -> Reduction:
    """The reduction that a torch operation means for numbers of a type.

    Raises:
        BadArgument: the type has no such operation.
    """
    known = _TORCH.get(kind)
    call = f"reduce op {kind} of {dtype}"
    if known is None:
        raise BadArgument(call, "not known to the shoal backend; use sum, avg, product, min, max")
    name, combine, logical = known
    real = dtype.is_floating_point or dtype.is_complex
    if name in ("band", "bor", "bxor") and real:
        raise BadArgument(call, "bits are combined of integers and bool only")
    if name in ("min", "max") and dtype.is_complex:
        raise BadArgument(call, "complex numbers have no order; use view_as_real")
    if name == "avg" and not real:
        raise BadArgument(call, "a mean of integers is no integer; sum and divide")
    widens = dtype.is_floating_point and dtype.itemsize == 1
    chosen = logical if dtype == torch.bool else combine
    return Reduction(name, chosen, name == "avg", widens)
