"""Check that a checkpoint fits a model. Values are never cast to another dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.checkpoint.state import Loaded
from shoal.errors import CheckpointMismatch


def match(expected: Mapping[str, Tensor], loaded: Loaded, *, under: str = "model") -> None:
    """Raise if the names, shapes or dtypes of a checkpoint differ from those of a model.

    Args:
        expected: the model's tensors by name. They may be meta tensors, since values are not used.
        loaded: the result of :func:`load`.
        under: the key of ``loaded.shared`` that holds the model's state.

    Raises:
        CheckpointMismatch: the message names the first tensor that differs, and how.
    """
    checkpoint_text = f"the checkpoint {loaded.path}"
    saved: Any = loaded.shared.get(under)
    if not isinstance(saved, Mapping):
        present = sorted(loaded.shared)
        raise CheckpointMismatch(f"{checkpoint_text} has no {under!r}, only {present}")
    for name, tensor in expected.items():
        if not isinstance(value := saved.get(name), Tensor):
            raise CheckpointMismatch(f"{name} is in the model, but not in {checkpoint_text}")
        require_same_type(name, tensor, value, checkpoint_text)
    for name, value in saved.items():
        if isinstance(value, Tensor) and name not in expected:
            raise CheckpointMismatch(f"{name} is in {checkpoint_text}, but not in the model")


def require_same_type(name: str, expected: Tensor, saved: Tensor, checkpoint_text: str) -> None:
    """Raise if two tensors differ in shape or dtype.

    Raises:
        CheckpointMismatch: the message names the tensor and both shapes or dtypes.
    """
    if (a := tuple(expected.shape)) != (b := tuple(saved.shape)):
        raise CheckpointMismatch(f"{name} has shape {a} in the model, but {b} in {checkpoint_text}")
    if expected.dtype != saved.dtype:
        text = f"{name} is {expected.dtype} in the model, but {saved.dtype} in {checkpoint_text}"
        raise CheckpointMismatch(f"{text}; convert the model first, because values are never cast")
