"""Make tensors flat, contiguous and detached, as the backend needs; they must be on the CPU.

A tensor created in inference mode can be written only in that mode, but the thread that runs
asynchronous collectives is not in this mode. So :func:`flatten` returns a normal tensor with the
same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shoal.errors import BadArgument
from shoal.wire.shm.memory.barrier import op_signature

_FLAT = (1,)  # the stride of a contiguous tensor of one dimension


def flatten(tensor: Tensor, call: str) -> Tensor:
    """Return the tensor flat and contiguous, with the same memory if possible.

    A copy is returned if the tensor is not contiguous, or is a lazy conjugate or negative.

    Raises:
        BadArgument: the tensor is not a dense CPU tensor.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise BadArgument(
            f"{call} of a {tensor.layout} tensor on {tensor.device}",
            'the shoal backend sends only dense CPU tensors; use "cpu:gloo,cuda:nccl" for others',
        )
    simple = tensor.stride() == _FLAT and not tensor.requires_grad
    if simple and not (tensor.is_complex() or tensor.is_neg() or tensor.is_inference()):
        return tensor
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    flat = plain.contiguous().view(-1)
    if flat.is_inference():
        with torch.inference_mode(False):
            return from_dlpack(flat.view(torch.uint8)).view(flat.dtype)
    return flat


def flatten_output(tensor: Tensor, call: str) -> Tensor:
    """Flatten a tensor that the call writes to. :func:`restore` must copy the result back.

    Raises:
        BadArgument: as in :func:`flatten`, or because a stride is 0 and elements share an address.
    """
    flat = flatten(tensor, call)
    if flat is not tensor and tensor.numel() > 0:
        extents = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in extents):
            raise BadArgument(
                f"{call} into a tensor of {tuple(tensor.shape)} and strides {tensor.stride()}",
                "several of its elements share memory, so they cannot all be written; pass a clone",
            )
    return flat


def restore(tensor: Tensor, flat: Tensor) -> None:
    """Copy ``flat`` into the ``tensor`` that it was made from, unless they share memory."""
    if flat is tensor:
        return
    if flat.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(flat.view(tensor.shape))


def require_size(tensors: Sequence[Tensor], like: Tensor, *, numel: int, call: str) -> None:
    """Raise BadArgument unless all tensors have ``numel`` elements and the dtype of ``like``."""
    for tensor in tensors:
        if tensor.numel() != numel or tensor.dtype != like.dtype:
            raise BadArgument(
                call,
                f"needs {numel} elements of {like.dtype}, got {tensor.numel()} of {tensor.dtype}",
            )


@lru_cache(maxsize=1024)
def signature(call: str, dtype: torch.dtype, numel: int) -> bytes:
    """Return the signature of a call, which ranks compare and error messages show."""
    return op_signature(f"{call} of {str(dtype).removeprefix('torch.')} x {numel}")
