"""Check that a checkpoint belongs to a model; a different dtype is an error, never cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.checkpoint.state import Loaded
from shoal.errors import CheckpointMismatch


class TensorLike(Protocol):
    """Anything with a shape and a dtype, such as a tensor on the meta device."""

    @property
    def shape(self) -> torch.Size:
        """The size of each dimension."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""


def match(expected: Mapping[str, TensorLike], loaded: Loaded, *, under: str = "model") -> None:
    """Raise if the checkpoint is of another model.

    Args:
        expected: the model's tensors by name; only shapes and dtypes are used.
        loaded: the result of :func:`load`.
        under: the key of ``loaded.shared`` that holds the model's state.

    Raises:
        CheckpointMismatch: names the first parameter that differs, and how.
    """
    where = f"the checkpoint {loaded.path}"
    saved: Any = loaded.shared.get(under)
    if not isinstance(saved, Mapping):
        raise CheckpointMismatch(f"{where} has no {under!r}, only {sorted(loaded.shared)}")
    for name, tensor in expected.items():
        if not isinstance(value := saved.get(name), Tensor):
            raise CheckpointMismatch(f"{name}: the model has it, {where} does not")
        require_same_type(name, tensor, value, where)
    for name, value in saved.items():
        if isinstance(value, Tensor) and name not in expected:
            raise CheckpointMismatch(f"{name}: {where} has it, the model does not")


def require_same_type(name: str, expected: TensorLike, saved: TensorLike, where: str) -> None:
    """Raise if two tensors differ in shape or dtype.

    Raises:
        CheckpointMismatch: names both.
    """
    if tuple(expected.shape) != tuple(saved.shape):
        a, b = tuple(expected.shape), tuple(saved.shape)
        raise CheckpointMismatch(f"{name}: shape {a} in the model, {b} in {where}")
    if expected.dtype != saved.dtype:
        text = f"{name}: {expected.dtype} in the model, {saved.dtype} in {where}"
        raise CheckpointMismatch(f"{text}; convert the model first, values are never cast")
