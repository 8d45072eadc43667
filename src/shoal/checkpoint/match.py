"""Whether a checkpoint is of this model; a wrong dtype is refused, never cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.checkpoint.state import Loaded
from shoal.errors import CheckpointMismatch


class Like(Protocol):
    """Anything with a shape and a dtype: a tensor, on the meta device too."""

    @property
    def shape(self) -> torch.Size:
        """Its sizes."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""


def match(expected: Mapping[str, Like], loaded: Loaded, *, under: str = "model") -> None:
    """Refuse a checkpoint of another model.

    Args:
        expected: the model's names, with anything that has their shape and dtype.
        loaded: what :func:`load` returned.
        under: the key of ``loaded.shared`` that holds the model's state.

    Raises:
        CheckpointMismatch: naming the first parameter that differs, and how.
    """
    where = f"the checkpoint {loaded.path}"
    found: Any = loaded.shared.get(under)
    if not isinstance(found, Mapping):
        raise CheckpointMismatch(f"{where} holds no {under!r}, only {sorted(loaded.shared)}")
    for name, wanted in expected.items():
        if not isinstance(value := found.get(name), Tensor):
            raise CheckpointMismatch(f"{name}: the model has it, {where} has not")
        differ(name, wanted, value, where)
    for name, value in found.items():
        if isinstance(value, Tensor) and name not in expected:
            raise CheckpointMismatch(f"{name}: {where} has it, the model has not")


def differ(name: str, wanted: Like, found: Like, where: str) -> None:
    """Refuse another shape or dtype.

    Raises:
        CheckpointMismatch: with both.
    """
    if tuple(wanted.shape) != tuple(found.shape):
        a, b = tuple(wanted.shape), tuple(found.shape)
        raise CheckpointMismatch(f"{name}: shape {a} in the model, {b} in {where}")
    if wanted.dtype != found.dtype:
        text = f"{name}: {wanted.dtype} in the model, {found.dtype} in {where}"
        raise CheckpointMismatch(f"{text}; convert the model first, values are never cast")
