"""The six axes of a strategy: each folder is an axis, and has one file per technique."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.axes import collectives, compression, coordination, partition, scheduling, synchrony

AXES: dict[str, tuple[Callable[..., Any], ...]] = {
    "partition": partition.MEMBERS,
    "coordination": coordination.MEMBERS,
    "synchrony": synchrony.MEMBERS,
    "scheduling": scheduling.MEMBERS,
    "compression": compression.MEMBERS,
    "collectives": collectives.MEMBERS,
}
QUESTIONS = {
    "partition": "What is cut?",
    "coordination": "With whom do I agree?",
    "synchrony": "When do I wait?",
    "scheduling": "In what order do messages go?",
    "compression": "In what form?",
    "collectives": "By what route?",
}
FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for fs in AXES.values() for f in fs}


class Member(NamedTuple):
    """One technique as it is listed in the catalogue; ``paper`` and ``link`` may be empty."""

    axis: str
    name: str
    signature: str
    summary: str
    paper: str
    link: str


def axis_of(name: str) -> str:
    """Return the axis of the technique with this name."""
    return next(axis for axis, fs in AXES.items() for f in fs if f.__name__ == name)


def catalogue() -> tuple[Member, ...]:
    """Return all techniques of all axes; their texts are read from the docstrings."""
    return tuple(_member(axis, f) for axis, functions in AXES.items() for f in functions)


def _member(axis: str, function: Callable[..., Any]) -> Member:
    summary = (inspect.getdoc(function) or "").splitlines()[0]
    parameters = ", ".join(inspect.signature(function).parameters)
    signature = f"{function.__name__}({parameters})" if parameters else function.__name__
    module = inspect.getdoc(inspect.getmodule(function)) or ""
    text = " ".join(module.partition("References:")[2].split())
    match = re.search(r"(.*?), `(.*?) <(.*?)>`_, (\d{4})", text)
    paper = f"{match[1]}, {match[2]}, {match[4]}" if match else ""
    link = match[3] if match else ""
    return Member(axis, function.__name__, signature, summary, paper, link)
