"""Nested state as a JSON tree, with its tensors taken out and named.

JSON has no integer keys, tuples or NaN, all of which an optimizer's state has; each is written as
an object with one ``$`` key. A name is the path, ``model/layer.weight``: unlike dots, a slash is
rare inside keys, and is escaped there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.errors import BadArgument

DEPTH = 64
"""How deep state may nest: deeper is a cycle, or an attack."""

Json = Any


def flatten(value: object, name: str) -> tuple[Json, dict[str, Tensor]]:
    """The tree of ``value``, and its tensors by name; every name starts with ``name``."""
    tensors: dict[str, Tensor] = {}
    return _encode(value, (name,), tensors), tensors


def unflatten(tree: Json, tensor: Callable[[str], object]) -> Any:
    """What :func:`flatten` took apart; ``tensor`` gives the tensor of a name.

    Raises:
        ValueError: the tree is not one of ours.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (key, value), *_ = tree.items()
        if key.startswith("$"):
            return _special(key, value, tensor)
    return {key: unflatten(value, tensor) for key, value in tree.items()}


def _encode(value: object, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Json:
    if len(path) > DEPTH:
        raise BadArgument(_shown(path), f"nested deeper than {DEPTH}, or contains itself")
    if isinstance(value, Tensor):
        name = _unused("/".join(path), tensors)
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if isinstance(value, (list, tuple)):
        items = [_encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    return _scalar(value, path)


def _encode_dict(value: dict[Any, Any], path: tuple[str, ...], tensors: dict[str, Tensor]) -> Json:
    pairs = [
        [_scalar(key, path), _encode(item, (*path, _escaped(key)), tensors)]
        for key, item in value.items()
    ]
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(pairs)
    return {"$dict": pairs}


def _scalar(value: object, path: tuple[str, ...]) -> Json:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    why = f"a {type(value).__name__} cannot be saved: use tensors, numbers, strings, lists or dicts"
    raise BadArgument(_shown(path), why)


def _special(key: str, value: Json, tensor: Callable[[str], object]) -> Any:
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
            raise ValueError(f"a dict with a key that is no scalar: {error}") from error
    raise ValueError(f"unknown form {key!r} in the tree")


def _escaped(key: object) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")


def _unused(name: str, tensors: dict[str, Tensor]) -> str:
    while name in tensors:  # {0: a, "0": b}
        name += "'"
    return name


def _shown(path: tuple[str, ...]) -> str:
    return "/".join(path[:6]) + ("/…" if len(path) > 6 else "")
