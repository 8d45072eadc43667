"""Laws of the techniques of all axes about docstrings, samples, and a repr that parses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from shoal import notation
from shoal.axes import FUNCTIONS
from shoal.axes.collectives import Collective
from shoal.axes.compression import Compressor
from shoal.axes.coordination import Coordination
from shoal.axes.partition import Partition
from shoal.axes.scheduling import Schedule
from shoal.axes.synchrony import Synchrony
from shoal.testing.contracts import (
    collectives,
    compression,
    coordination,
    partition,
    scheduling,
    synchrony,
)
from shoal.testing.contracts.require import require

Technique = Callable[..., Any]
Law = Callable[[Any], None]


def samples(function: Technique) -> tuple[str, ...]:
    """Return texts that a user may type for a technique, from ``Example:`` or else its name.

    The docstring of the function has a line such as: ``Example: ``topk(0.25)``, ``topk(1)``.`` If
    all parameters have defaults, this line may be missing.
    """
    line = re.search(r"^Example:(.*?)(?:\n\s*\n|\Z)", inspect.getdoc(function) or "", re.S | re.M)
    texts = tuple(re.findall(r"``(.+?)``", line[1])) if line else ()
    if texts:
        return texts
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    require(
        not needed,
        f"{function.__name__} needs {', '.join(needed)}, but has no sample: add a line such as "
        f"'Example: ``{function.__name__}(...)``.' to its docstring",
    )
    return (function.__name__,)


def make(text: str, *functions: Technique) -> Any:
    """Return the value of a text such as ``topk(0.1)``. ``functions`` extend Shoal's own."""
    known = {**FUNCTIONS, **{f.__name__: f for f in functions}}
    return notation.call(text, known, "technique")


def check(value: Any) -> None:
    """Run every law of the value's axis on it."""
    for law in laws_of(value):
        law(value)


def laws_of(value: Any) -> tuple[Law, ...]:
    """Return the laws of the axis of a value."""
    for kind, laws in LAWS.items():
        if isinstance(value, kind):
            return (it_is_a_frozen_value, *laws)
    raise AssertionError(f"{value!r} is of no axis, but of {type(value)}")


def check_member(function: Technique) -> None:
    """Check a technique's name and docstrings, and run every law on each of its samples."""
    name = function.__name__
    require(name.isidentifier() and name == name.lower(), f"{name}: its name is not lower-case")
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    require(summary.endswith("."), f"{name}: line 1 of its docstring must be a whole sentence")
    module = inspect.getdoc(inspect.getmodule(function)) or ""
    require("References:" in module, f"{name}: the docstring of its module needs References:")
    for text in samples(function):
        own = re.match(rf"{name}\b", text) is not None
        require(own, f"{name}: {text} is a sample of another technique")
        value = make(text, function)
        again = make(repr(value), function)
        require(value == again, f"{name}: {text} prints as {value!r}, which parses as {again!r}")
        check(value)


def it_is_a_frozen_value(value: Any) -> None:
    """The value cannot be changed, is equal to its copy, and has the same hash as its copy."""
    require(value == copy.copy(value), f"{value!r} is not equal to its copy")
    require(len({value, copy.copy(value)}) == 1, f"{value!r} has another hash than its copy")
    first = dataclasses.fields(value)[0].name
    try:
        setattr(value, first, getattr(value, first))
    except dataclasses.FrozenInstanceError:
        return
    raise AssertionError(f"{value!r} can be changed: its dataclass must be frozen")


LAWS: dict[type, tuple[Law, ...]] = {
    Compressor: compression.LAWS,
    Coordination: coordination.LAWS,
    Synchrony: synchrony.LAWS,
    Schedule: scheduling.LAWS,
    Collective: collectives.LAWS,
    Partition: partition.LAWS,
}
