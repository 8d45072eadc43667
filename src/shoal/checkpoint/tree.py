"""Convert nested state to a JSON tree and named tensors, and back.

JSON has no tensors, integer keys, tuples or NaN, but the state of an optimizer has. Each of them is
encoded as an object with one key that starts with ``$``. The name of a tensor is its path, such as
``shared/model/layer.weight``. Paths use a slash because keys often contain dots; a slash in a key
is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.errors import BadArgument

DEPTH = 64
"""Largest depth of nesting that :func:`flatten` accepts; deeper state usually contains itself."""

Json = Any


def flatten(value: object, name: str) -> tuple[Json, dict[str, Tensor]]:
    """Return ``value`` as a JSON tree, and its tensors by name; all names start with ``name``."""
    tensors: dict[str, Tensor] = {}
    return _encode(value, (name,), tensors), tensors


def unflatten(tree: Json, tensor: Callable[[str], object]) -> Any:
    """Return the value that :func:`flatten` encoded, with ``tensor(name)`` for each tensor.

    Raises:
        ValueError: ``tree`` has an object that :func:`flatten` never makes.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (key, value), *_ = tree.items()
        if key.startswith("$"):
            return _decode_special(key, value, tensor)
    return {key: unflatten(value, tensor) for key, value in tree.items()}


def _encode(value: object, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Json:
    if len(path) > DEPTH:
        why = f"it is nested deeper than {DEPTH} levels, or contains itself"
        raise BadArgument(_shorten(path), why)
    if isinstance(value, Tensor):
        name = "/".join(path)
        while name in tensors:  # the keys of {0: a, "0": b} give the same path
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if isinstance(value, (list, tuple)):
        items = [_encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    return _encode_scalar(value, path)


def _encode_dict(value: dict[Any, Any], path: tuple[str, ...], tensors: dict[str, Tensor]) -> Json:
    pairs = []
    for key, item in value.items():
        escaped = str(key).replace("~", "~0").replace("/", "~1")
        pairs.append([_encode_scalar(key, path), _encode(item, (*path, escaped), tensors)])
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(pairs)
    return {"$dict": pairs}


def _encode_scalar(value: object, path: tuple[str, ...]) -> Json:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    why = f"a {type(value).__name__} cannot be saved: use tensors, numbers, strings, lists or dicts"
    raise BadArgument(_shorten(path), why)


def _decode_special(key: str, value: Json, tensor: Callable[[str], object]) -> Any:
    if key == "$tensor" and isinstance(value, str):
        return tensor(value)
    if key == "$tuple" and isinstance(value, list):
        return tuple(unflatten(item, tensor) for item in value)
    if key == "$float" and value in ("nan", "inf", "-inf"):
        return float(value)
    if key == "$dict" and isinstance(value, list):
        try:
            return {unflatten(k, tensor): unflatten(item, tensor) for k, item in value}
        except TypeError as error:
            raise ValueError(f"a key of a dict is not a scalar: {error}") from error
    raise ValueError(f"the tree has an invalid object with the key {key!r}")


def _shorten(path: tuple[str, ...]) -> str:
    return "/".join(path[:6]) + ("/…" if len(path) > 6 else "")
