"""Read and write values as text: sizes in bytes, numbers, and calls of techniques."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from shoal.errors import BadArgument, UnknownName, UsageError

UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30}
_SIZE = re.compile(r"(?<![\w.])(\d+)\s*(KB|MB|GB)\b", re.ASCII)
LONGEST = 2000  # characters of a strategy; a longer one is a mistake or an attack


def nbytes_text(nbytes: int) -> str:
    """Return a size as it is typed: ``25MB``, ``512KB``, ``1``."""
    for unit, factor in reversed(UNITS.items()):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def check_nbytes(call: str, nbytes: object) -> None:
    """Raise unless ``nbytes`` is a size."""
    if not is_whole(nbytes, 1, 2**40):
        raise BadArgument(f"{call}({nbytes})", "a size in bytes from 1 up, for example 25MB")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    """Return whether a value is an integer within these bounds; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return (least is None or value >= least) and (most is None or value <= most)


def check_momentum(call: str, momentum: object) -> None:
    """Raise unless ``momentum`` is a factor under which a sum stays bounded."""
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise BadArgument(f"{call}(momentum={momentum})", "momentum must lie in [0, 1)")


def typed(number: float) -> str:
    """Return a number with every digit: techniques are equal if their names are."""
    return repr(float(number)).removesuffix(".0")


def split(text: str) -> list[str]:
    """Split at the commas that stand outside all brackets."""
    if len(text) > LONGEST:
        raise UsageError(f"a strategy of {len(text)} characters: the longest allowed is {LONGEST}")
    items, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def call(text: str, known: Mapping[str, Callable[..., Any]], kind: str) -> Any:
    """Evaluate ``name`` or ``name(arguments)`` with the functions ``known``, and nothing else."""
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
            near = _same_axis(known[name], known)
            args = [_value(a, near, kind) for a in node.args]
            words = {_word(k): _value(k.value, near, kind) for k in node.keywords}
            return _call(name, known[name], args, words)
        case ast.Name(id=name):
            raise UnknownName(kind, name, known)
        case ast.BinOp(op=ast.Mult(), left=left, right=right) if outermost:  # never of constants
            one, other = (_value(side, known, kind, outermost=True) for side in (left, right))
            return _product(one, other, text=ast.unparse(node))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Constant(value=int() | float() | str() as constant) if not outermost:
            return constant
        case _:
            raise UsageError(f"cannot read {ast.unparse(node)!r}: write names or calls")


def _word(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise UsageError(f"cannot read {ast.unparse(keyword)!r}: write each argument out")
    return keyword.arg


def _same_axis(
    function: Callable[..., Any], known: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Return the functions of the same axis: in gossip(ring), ring is a graph and not the route."""
    home = function.__module__.rpartition(".")[0]
    return {n: f for n, f in known.items() if f.__module__.rpartition(".")[0] == home}


def _product(left: Any, right: Any, text: str) -> Any:
    try:
        return left * right
    except TypeError:
        raise UsageError(f"cannot read {text!r}: only partitions multiply") from None


def _call(name: str, function: Callable[..., Any], args: list[Any], words: dict[str, Any]) -> Any:
    try:
        return function(*args, **words)
    except TypeError as error:
        why = str(error).replace(f"{function.__name__}() ", "")
        arguments = [*map(str, args), *(f"{word}={value}" for word, value in words.items())]
        takes = ", ".join(inspect.signature(function).parameters)
        raise BadArgument(f"{name}({', '.join(arguments)})", f"{why}; it takes ({takes})") from None
