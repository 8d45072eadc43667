"""Six answers in one frozen value, and the line of text that says it.

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
_FILLED_IN = fifo()  # a mark: what is left out is chosen to fit the rest


@dataclass(frozen=True, repr=False)
class Strategy:
    """How one model is trained on many machines.

    Every field is one answer; what is left out gets the plainest answer that is legal with the
    rest. Raises ``ConflictError`` with every conflict at once.

    Args:
        partition: what is cut.
        coordination: with whom to agree.
        synchrony: when to wait.
        scheduling: in what order messages go; left out, during backward where that can be.
        compression: in what form.
        collectives: by what route.
    """

    partition: Partition = data()  # noqa: RUF009
    coordination: Coordination = all_reduce()  # noqa: RUF009
    synchrony: Synchrony = bsp()  # noqa: RUF009
    scheduling: Schedule = _FILLED_IN
    compression: Compressor = exact()  # noqa: RUF009
    collectives: Collective = native()  # noqa: RUF009

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                given = getattr(self, name)
                raise BadArgument(f"Strategy({name}={given!r})", f"{name} takes a {kind.__name__}")
        if self.scheduling is _FILLED_IN:
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
        """What is legal but unwise."""
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
    """Read a strategy: answers in any order, separated by commas; ``auto`` is the plainest one.

    ``tensor=2`` may be written for ``tensor(2)``, and several cuts multiply.
    """
    if not isinstance(text, str):
        raise UsageError(f"a strategy is text or a Strategy, not {text!r}")
    if text.strip() in ("", AUTO):
        return Strategy()
    answers: dict[str, Any] = {}
    for item in notation.split(text):
        made = notation.call(_as_call(item), FUNCTIONS, "technique")
        axis = next((a for a, kind in _KINDS.items() if isinstance(made, kind)), None)
        if axis is None:
            raise UsageError(f"{item!r} answers none of the six questions")
        if axis == "partition" and axis in answers:
            answers[axis] = answers[axis] * made
        elif axis in answers:
            raise UsageError(
                f"two answers to {axis}: {answers[axis]!r} and {made!r}; keep one of them"
            )
        else:
            answers[axis] = made
    return Strategy(**answers)


def _as_call(item: str) -> str:
    found = re.fullmatch(r"(\w+)\s*=\s*(.+)", item)
    if found and found[1] in FUNCTIONS and axis_of(found[1]) == "partition":
        return f"{found[1]}({found[2]})"
    return item
