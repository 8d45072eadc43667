"""Parse and format the text of a strategy: sizes in bytes, numbers, and calls of techniques."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from shoal.errors import BadArgument, UnknownName, UsageError

UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30}
_SIZE = re.compile(r"(?<![\w.])(\d+)\s*(KB|MB|GB)\b", re.ASCII)
MAX_CHARACTERS = 2000  # limit for a strategy's text; a longer text is a mistake or an attack


def nbytes_text(nbytes: int) -> str:
    """Return a number of bytes as a user types it: ``25MB``, ``512KB``, ``1``."""
    for unit, factor in reversed(UNITS.items()):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def check_nbytes(call: str, nbytes: object) -> None:
    """Raise BadArgument unless ``nbytes`` is a whole number from 1 to 2**40."""
    if not is_whole(nbytes, 1, 2**40):
        raise BadArgument(f"{call}({nbytes})", "it needs a whole number of bytes, such as 25MB")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    """Return whether a value is an int, not a bool, from ``least`` to ``most`` inclusive."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return (least is None or value >= least) and (most is None or value <= most)


def check_momentum(call: str, momentum: object) -> None:
    """Raise BadArgument unless ``momentum`` is a number with 0 <= momentum < 1."""
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise BadArgument(f"{call}(momentum={momentum})", "momentum must be a number in [0, 1)")


def typed(number: float) -> str:
    """Return a number as text with all its digits, because equal names must mean equal values."""
    return repr(float(number)).removesuffix(".0")


def split(text: str) -> list[str]:
    """Return the parts of a text between the commas that are outside all parentheses."""
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"the strategy has {len(text)} characters; the limit is {MAX_CHARACTERS}")
    items, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def call(text: str, known: Mapping[str, Callable[..., Any]], kind: str) -> Any:
    """Return the value of ``name``, ``name(arguments)`` or a product of these by ``*``.

    Only ``known`` functions are called. ``kind`` is the word for a name in error messages.
    """
    sized = _SIZE.sub(lambda match: str(int(match[1]) * UNITS[match[2]]), text)
    try:
        tree = ast.parse(sized.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(f"cannot read {text!r}: write names or calls, as in topk(0.01)") from None
    try:
        return _value(tree, known, kind, outermost=True)
    except RecursionError:
        raise UsageError(f"cannot read {text[:40]!r}...: it is nested too deeply") from None


def _value(
    node: ast.expr, known: Mapping[str, Callable[..., Any]], kind: str, *, outermost: bool = False
) -> Any:
    match node:
        case ast.Name(id=name) if name in known:
            return _call(name, known[name], [], {})
        case ast.Name(id=name) if not outermost:
            return float("inf") if name == "inf" else name
        case ast.Call(func=ast.Name(id=name)):
            if name not in known:
                raise UnknownName(kind, name, known)
            allowed = _same_axis(known[name], known)
            args = [_value(a, allowed, kind) for a in node.args]
            keywords = {_keyword_name(k): _value(k.value, allowed, kind) for k in node.keywords}
            return _call(name, known[name], args, keywords)
        case ast.Name(id=name):
            raise UnknownName(kind, name, known)
        case ast.BinOp(op=ast.Mult(), left=left, right=right) if outermost:  # constants are refused
            one, other = (_value(side, known, kind, outermost=True) for side in (left, right))
            return _product(one, other, text=ast.unparse(node))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Constant(value=int() | float() | str() as constant) if not outermost:
            return constant
        case _:
            raise UsageError(f"cannot read {ast.unparse(node)!r}: write names or calls")


def _keyword_name(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise UsageError(f"cannot read {ast.unparse(keyword)!r}: write arguments as name=value")
    return keyword.arg


def _same_axis(
    function: Callable[..., Any], known: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Return the known functions of the axis of ``function``.

    So in gossip(ring), ``ring`` is the name of a graph, not the collective.
    """
    axis = function.__module__.rpartition(".")[0]
    return {n: f for n, f in known.items() if f.__module__.rpartition(".")[0] == axis}


def _product(left: Any, right: Any, text: str) -> Any:
    try:
        return left * right
    except TypeError:
        raise UsageError(f"cannot read {text!r}: only partitions can be multiplied") from None


def _call(name: str, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        why = str(error).replace(f"{function.__name__}() ", "")
        arguments = [*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())]
        why += f"; its signature is {name}({', '.join(inspect.signature(function).parameters)})"
        raise BadArgument(f"{name}({', '.join(arguments)})", why) from None
