"""Tensors as the backend moves them: flat, contiguous, detached, on the CPU.

Those made in inference mode may be written to in that mode only, which a thread that works in the
background is not in; it is given ordinary tensors of the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shoal.errors import BadArgument

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
