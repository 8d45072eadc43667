"""What compression remembers follows its numbers into other messages.

Memory is kept by parameter, or by range of a parameter where it was cut. When messages change, the
parts of memory that are as large as what they belong to (residuals, momenta) are put together and
cut anew; whatever else is remembered (a count) is taken from the first piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from shoal.axes.compression import Value

_RANGE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.S)


class Part(NamedTuple):
    """Memory of the numbers from ``start`` to ``stop`` of a parameter."""

    start: int
    stop: int
    memory: Any


def recut(
    states: Mapping[str, Any],
    pieces: Mapping[str, Tensor],
    views: Mapping[str, Tensor],
    init: Callable[[Value], Any],
) -> dict[str, Any]:
    """Memory for each of these pieces, from that of others of the same parameters.

    Args:
        states: by ``name``, or ``name[start:stop]`` of a range.
        pieces: what is to be sent from now on, by such keys.
        views: every parameter whole, by name.
        init: the memory of what was never sent.
    """
    held: dict[str, list[Part]] = {}
    for key, memory in states.items():
        name, start, stop = span(key, views)
        held.setdefault(name, []).append(Part(start, stop, memory))
    made = {}
    for key, piece in pieces.items():
        name, start, stop = span(key, views)
        fresh = init(Value(piece, key)) if key not in states else None
        meets = [p for p in held.get(name, ()) if p.start < stop and start < p.stop]
        if key in states or not meets:
            made[key] = states.get(key, fresh)
        else:
            made[key] = _filled(Part(start, stop, fresh), meets, views[name])
    return made


def span(key: str, views: Mapping[str, Tensor]) -> tuple[str, int, int]:
    """The parameter that a key speaks of, and the range of its numbers."""
    ranged = None if key in views else _RANGE.fullmatch(key)
    if ranged is not None:
        return ranged[1], int(ranged[2]), int(ranged[3])
    return key, 0, views[key].numel() if key in views else 0


def _filled(fresh: Part, held: list[Part], view: Tensor) -> Any:
    """Fresh memory, with what others remember of the same numbers in it."""
    start, stop, memory = fresh
    if isinstance(memory, Tensor) and memory.numel() == stop - start:
        into = _flat(memory, view).clone()
        for part in held:
            first, last = max(start, part.start), min(stop, part.stop)
            told = _flat(part.memory, view)[first - part.start : last - part.start]
            into[first - start : last - start] = told
        whole = memory.shape == view.shape
        return into.as_strided(view.shape, view.stride()) if whole else into.view(memory.shape)
    if isinstance(memory, tuple | list):
        columns = zip(*(part.memory for part in held), strict=True)
        items = [
            _filled(Part(start, stop, item), _each(held, column), view)
            for item, column in zip(memory, columns, strict=True)
        ]
        named = hasattr(memory, "_fields")
        return type(memory)(*items) if named else type(memory)(items)
    if isinstance(memory, dict):
        return {
            k: _filled(Part(start, stop, v), _each(held, [p.memory[k] for p in held]), view)
            for k, v in memory.items()
        }
    kept = held[0].memory
    alike = getattr(kept, "shape", None) == getattr(memory, "shape", None)
    return kept if type(kept) is type(memory) and alike else memory


def _each(held: list[Part], memories: Any) -> list[Part]:
    return [p._replace(memory=memory) for p, memory in zip(held, memories, strict=True)]


def _flat(memory: Tensor, view: Tensor) -> Tensor:
    """Its numbers in the order in which those of the parameter lie in memory."""
    if memory.shape != view.shape or view.is_contiguous():
        return memory.reshape(-1)
    flat = memory.new_empty(memory.numel())
    flat.as_strided(view.shape, view.stride()).copy_(memory)
    return flat
