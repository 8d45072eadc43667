"""A strategy: one technique per axis, as a frozen value and as a line of text.

>>> parse("all_reduce, local(8), error_feedback(topk(0.01))")
data, all_reduce, local(8), fifo, error_feedback(topk(0.01)), native
>>> s = Strategy(coordination=gossip("ring"))
>>> parse(repr(s)) == s
True
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from shoal import notation, rules
from shoal.axes import FUNCTIONS, axis_of
from shoal.axes.collectives import Collective, native
from shoal.axes.compression import Compressor, exact
from shoal.axes.coordination import Coordination, all_reduce, gossip
from shoal.axes.partition import Partition, data
from shoal.axes.scheduling import Schedule, fifo, wfbp
from shoal.axes.synchrony import Synchrony, bsp
from shoal.errors import BadArgument, ConflictError, UsageError

__all__ = ["AUTO", "Strategy", "gossip", "parse"]

AUTO = "auto"
_DEFAULT = fifo()  # a marker: the default schedule depends on the other techniques


@dataclass(frozen=True, repr=False)
class Strategy:
    """How one model is trained on many machines.

    Every field is the technique of one axis; what is left out gets the plainest technique that is
    legal with the others. Raises ``ConflictError`` with all conflicts at once.

    Args:
        partition: how the model is cut.
        coordination: with whom a worker agrees.
        synchrony: when it waits.
        scheduling: the order of messages; by default during backward where possible.
        compression: the form of messages.
        collectives: the route of sums.
    """

    partition: Partition = data()  # noqa: RUF009
    coordination: Coordination = all_reduce()  # noqa: RUF009
    synchrony: Synchrony = bsp()  # noqa: RUF009
    scheduling: Schedule = _DEFAULT
    compression: Compressor = exact()  # noqa: RUF009
    collectives: Collective = native()  # noqa: RUF009

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise BadArgument(f"Strategy({name}={value!r})", f"{name} takes a {kind.__name__}")
        if self.scheduling is _DEFAULT:
            plain = wfbp() if rules.can_overlap(self) else fifo()
            object.__setattr__(self, "scheduling", plain)
        if conflicts := rules.conflicts(self):
            raise ConflictError(conflicts)

    def bind(self, facts: rules.Facts) -> Strategy:
        """Check against the workers, the model and the optimizer; raise all conflicts at once."""
        self.partition.replicas(facts.ranks)
        if conflicts := rules.bound_conflicts(self, facts):
            raise ConflictError(conflicts)
        return self

    def advice(self) -> tuple[str, ...]:
        """Return what is legal but unwise."""
        return rules.advice(self)

    def __repr__(self) -> str:
        return ", ".join(repr(getattr(self, f.name)) for f in fields(self))


_KINDS: dict[str, type] = {
    "partition": Partition,
    "coordination": Coordination,
    "synchrony": Synchrony,
    "scheduling": Schedule,
    "compression": Compressor,
    "collectives": Collective,
}


def parse(text: str) -> Strategy:
    """Read a strategy: techniques in any order, separated by commas; ``auto`` is the plainest one.

    ``tensor=2`` may be written for ``tensor(2)``, and several partitions multiply.
    """
    if not isinstance(text, str):
        raise UsageError(f"a strategy is text or a Strategy, not {text!r}")
    if text.strip() in ("", AUTO):
        return Strategy()
    techniques: dict[str, Any] = {}
    for item in notation.split(text):
        value = notation.call(_as_call(item), FUNCTIONS, "technique")
        axis = next((a for a, kind in _KINDS.items() if isinstance(value, kind)), None)
        if axis is None:
            raise UsageError(f"{item!r} is no technique of any axis")
        if axis == "partition" and axis in techniques:
            techniques[axis] = techniques[axis] * value
        elif axis in techniques:
            both = f"{techniques[axis]!r} and {value!r}"
            raise UsageError(f"two techniques for {axis}: {both}; keep one of them")
        else:
            techniques[axis] = value
    return Strategy(**techniques)


def _as_call(item: str) -> str:
    match = re.fullmatch(r"(\w+)\s*=\s*(.+)", item)
    if match and match[1] in FUNCTIONS and axis_of(match[1]) == "partition":
        return f"{match[1]}({match[2]})"
    return item
