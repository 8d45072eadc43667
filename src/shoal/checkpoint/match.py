"""Check that a checkpoint belongs to a model; a different dtype is an error, never cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.checkpoint.state import Loaded
from shoal.errors import CheckpointMismatch


def match(expected: Mapping[str, Tensor], loaded: Loaded, *, under: str = "model") -> None:
    """Raise if the checkpoint is of another model.

    Args:
        expected: the model's tensors by name, perhaps on the meta device: values are not used.
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


def require_same_type(name: str, expected: Tensor, saved: Tensor, where: str) -> None:
    """Raise if two tensors differ in shape or dtype.

    Raises:
        CheckpointMismatch: names both.
    """
    if (a := tuple(expected.shape)) != (b := tuple(saved.shape)):
        raise CheckpointMismatch(f"{name}: shape {a} in the model, {b} in {where}")
    if expected.dtype != saved.dtype:
        text = f"{name}: {expected.dtype} in the model, {saved.dtype} in {where}"
        raise CheckpointMismatch(f"{text}; convert the model first, values are never cast")
