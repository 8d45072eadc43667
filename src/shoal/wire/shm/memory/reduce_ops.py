"""Combine the ranks' numbers, always in the order of ranks: ``((x0 + x1) + x2) + x3``.

The order is the same on every rank and in every run, so results are equal bit for bit.

Tensors as the backend moves them: flat, contiguous, detached, on the CPU.

Those made in inference mode may be written to in that mode only, which a thread that works in the
background is not in; it is given ordinary tensors of the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shoal.errors import BadArgument

Combine = Callable[..., Tensor]
_SERIAL = 32704  # torch splits what is longer among threads, which the other ranks' cores need

_KINDS: Any = dist.ReduceOp.RedOpType
# By number: torch hashes an operation, and its kind, to that; to compare two takes microseconds.
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
        for piece, *parts in _blocks(out, sources):
            self._block(piece, parts)

    def prepare(self, out: Tensor, sources: Sequence[Tensor]) -> Callable[[], None]:
        """What a call with the same tensors would do, to be done again and again."""
        if self.widens or len(sources) == 1:
            return partial(self.__call__, out, sources)
        blocks = list(_blocks(out, sources))
        steps = [step for piece, *parts in blocks for step in _steps(piece, parts)]
        divided = [piece for piece, *_ in blocks] if self.divides else []
        return partial(_run, self.combine, steps, divided, len(sources))

    def _block(self, out: Tensor, sources: Sequence[Tensor]) -> None:
        if self.widens:
            wide = torch.empty(out.shape, dtype=torch.float32)
            narrow = self._replace(widens=False)
            narrow._block(wide, [source.float() for source in sources])
            out.copy_(wide)
            return
        if len(sources) == 1:
            out.copy_(sources[0])
        for first, second, into in _steps(out, sources):
            self.combine(first, second, out=into)
        if self.divides:
            out.div_(len(sources))


def _steps(out: Tensor, sources: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Which two are combined into which, one after the other: the order that is promised."""
    first = sources[0]
    for second in sources[1:]:
        yield first, second, out
        first = out


def _run(
    combine: Combine, steps: Sequence[Sequence[Tensor]], divided: Sequence[Tensor], count: int
) -> None:
    for first, second, out in steps:
        combine(first, second, out=out)
    for out in divided:
        out.div_(count)


def _blocks(out: Tensor, sources: Sequence[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Parts of ``out`` and of each source, short enough for one thread."""
    if out.numel() <= _SERIAL or torch.get_num_threads() == 1:
        return ((out, *sources),)
    return zip(*(x.split(_SERIAL) for x in (out, *sources)), strict=True)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=256)
def reduction(kind: int, dtype: torch.dtype) -> Reduction:
    """The reduction that a torch operation means for numbers of a type.

    Args:
        kind: the hash of the operation.
        dtype: of the numbers.

    Raises:
        BadArgument: the type has no such operation.
    """
    known = _TORCH.get(kind)
    names = {int(each): name for name, each in _KINDS.__members__.items()}
    call = f"reduce op {names.get(kind, kind)} of {dtype}"
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
    if dtype in _SIGNED:
        if name in ("min", "max"):
            raise BadArgument(call, "torch cannot order these; use a signed type")
        chosen = partial(_as_signed, combine, _SIGNED[dtype])
    return Reduction(name, chosen, name == "avg", widens)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _as_signed(
    combine: Combine, signed: torch.dtype, first: Tensor, second: Tensor, *, out: Tensor
) -> Tensor:
    """Sums, products and bits of unsigned numbers are those of signed ones, which torch can do."""
    return combine(first.view(signed), second.view(signed), out=out.view(signed))


_FLAT = (1,)  # one dimension, side by side


def ordinary() -> torch.inference_mode:
    """Inside, views are ordinary ones even in inference mode: they may be kept for later."""
    return torch.inference_mode(False)


def flatten(tensor: Tensor, call: str) -> Tensor:
    """A flat contiguous form: the same memory where the tensor has such, else a copy.

    Raises:
        BadArgument: the tensor is not a dense one of the CPU.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise BadArgument(
            f"{call} of a {tensor.layout} tensor on {tensor.device}",
            'the shoal backend moves dense CPU tensors; use "cpu:gloo,cuda:nccl" for others',
        )
    plainly = tensor.stride() == _FLAT and not tensor.requires_grad
    if plainly and not (tensor.is_complex() or tensor.is_neg() or tensor.is_inference()):
        return tensor
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    flat = plain.contiguous().view(-1)
    if flat.is_inference():
        with ordinary():
            return from_dlpack(flat.view(torch.uint8)).view(flat.dtype)
    return flat


def writable(tensor: Tensor, call: str) -> Tensor:
    """The same of a tensor that will be written to.

    Raises:
        BadArgument: some of its numbers share their memory.
    """
    flat = flatten(tensor, call)
    if flat is not tensor and _repeats(tensor):
        raise BadArgument(
            f"{call} into a tensor of {tuple(tensor.shape)} and strides {tensor.stride()}",
            "its numbers share memory; give a clone",
        )
    return flat


def _repeats(tensor: Tensor) -> bool:
    """Whether several of its numbers are the same memory."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in extents)


def restore(tensor: Tensor, flat: Tensor) -> None:
    """Write a flat form back into the tensor it was made of, if that is other memory."""
    if flat is tensor:
        return
    if flat.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(flat.view(tensor.shape))


def same(tensors: Sequence[Tensor], like: Tensor, *, numel: int, call: str) -> None:
    """Make sure that tensors have one size and type.

    Raises:
        BadArgument: one has not.
    """
    for tensor in tensors:
        if tensor.numel() != numel or tensor.dtype != like.dtype:
            raise BadArgument(
                call,
                f"expects {numel} numbers of {like.dtype}, got {tensor.numel()} of {tensor.dtype}",
            )


def spell(dtype: torch.dtype, numel: int) -> str:
    """A type and a size, as they stand in messages."""
    return f"{str(dtype).removeprefix('torch.')} x {numel}"
