"""A collective is data: who copies which chunk to whom, round by round.

One description has many readers. :func:`shoal.axes.collectives.prove` checks it, a wire runs it, a
price walks it, a picture draws it. None of them can drift from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Copy(NamedTuple):
    """One chunk goes from ``source`` to ``target``, and is added there or takes the place."""

    source: int
    target: int
    chunk: int
    add: bool


Round = tuple[Copy, ...]
"""Copies that happen at once: each reads what its source held before the round."""


@dataclass(frozen=True, repr=False)
class Collective:
    """A route by which all workers come to hold the sum.

    Args:
        name: what one types; two collectives are equal when their names are.
        rounds: world -> the rounds, each a tuple of copies; None means whatever torch does.
        chunks: world -> into how many chunks a message is cut.
    """

    name: str
    rounds: Callable[[int], Iterable[Round]] | None = field(compare=False)
    chunks: Callable[[int], int] = field(compare=False)

    def __repr__(self) -> str:
        return self.name
