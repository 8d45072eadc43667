"""The one form every benchmark of the project is written in, on disk and on screen.

A report is a header (who measured what, where, with which versions and seeds) and a list of
results. A result carries its own target, so that a file can be judged without the code that
made it. ``from_json(to_json(report)) == report``, and whatever does not fit the form is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from shoal.errors import BadArgument

_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_BAR = re.compile(r"(<=|>=|<|>)\s*(\S+)")


class Interval(NamedTuple):
    """Where the number probably lies; ``statistics`` says how probably."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance from end to end."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Bar:
    """A target: ``<= 1.02``.

    >>> Bar.parse("<= 1.02").met(1.03), Bar.parse("<= 1.02").met(1.03, slack=0.02)
    (False, True)
    """

    relation: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Bar:
        """The bar that prints as ``text``."""
        match = _BAR.fullmatch(text.strip()) if isinstance(text, str) else None
        try:
            limit = float(match[2]) if match else math.nan
        except ValueError:
            limit = math.nan
        if match is None or not math.isfinite(limit):
            raise BadArgument(
                f"Bar.parse({text!r})", 'a bar is one of <=, >=, <, > and a number: "<= 1.02"'
            )
        return cls(match[1], limit)

    def met(self, number: float, *, slack: float = 0.0) -> bool:
        """Whether ``number`` keeps the bar after the bar has been widened by ``slack``."""
        widened = self.limit + slack if self.relation.startswith("<") else self.limit - slack
        return _RELATIONS[self.relation](number, widened)

    def __str__(self) -> str:
        return f"{self.relation} {self.limit:g}"


@dataclass(frozen=True)
class Result:
    """One number that was measured, and what it was held against.

    ``interval`` and ``bar`` speak of the ratio where there is one, else of the value. A bar with
    ``holds`` None means that the control was too noisy for a verdict.

    Attributes:
        case: what was measured, such as the model.
        metric: which property of it.
        value: the number, in ``unit``.
        unit: such as ``ms``; empty for a pure number.
        against: the peer or bound measured in the same run.
        ratio: value / against; of a timing, the median of paired ratios.
        interval: 95 % confidence interval.
        bar: the target as text, such as ``<= 1.02``.
        holds: whether the bar is met.
    """

    case: str
    metric: str
    value: float
    unit: str
    against: str | None = None
    ratio: float | None = None
    interval: Interval | None = None
    bar: str | None = None
    holds: bool | None = None

    def __post_init__(self) -> None:
        for name in ("case", "metric"):
            if not getattr(self, name):
                raise _misfit(name, "must not be empty")
        for name, number in (("value", self.value), ("ratio", self.ratio)):
            if number is not None and not math.isfinite(number):
                raise _misfit(name, f"{number} is not a finite number")
        if (self.against is None) != (self.ratio is None):
            raise _misfit("ratio", "needs against, and against needs ratio")
        if self.interval is not None and not self.interval.low <= self.interval.high:
            raise _misfit("interval", f"{tuple(self.interval)} does not rise from low to high")
        if self.bar is not None:
            Bar.parse(self.bar)
        elif self.holds is not None:
            raise _misfit("holds", "needs a bar to hold against")

    @property
    def undecided(self) -> bool:
        """There is a bar, and the noise allowed no verdict on it."""
        return self.bar is not None and self.holds is None


@dataclass(frozen=True)
class Machine:
    """What it was measured on."""

    cpu: str
    cores: int
    memory_nbytes: int
    kernel: str


@dataclass(frozen=True)
class Header:
    """Who measured what, when, on what, with which versions and seeds."""

    suite: str
    commit: str
    date: str
    machine: Machine
    versions: Mapping[str, str]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.suite:
            raise _misfit("suite", "must not be empty")
        try:
            zone = datetime.fromisoformat(self.date).tzinfo
        except ValueError:
            zone = None
        if zone is None:
            raise _misfit("date", f"{self.date!r} is not an ISO 8601 date with its time zone")
        missing = {"python", "torch", "shoal"} - set(self.versions)
        if missing:
            raise _misfit("versions", f"must tell those of {', '.join(sorted(missing))}")


@dataclass(frozen=True)
class Report:
    """A header and the results."""

    header: Header
    results: tuple[Result, ...]

    @property
    def exit_code(self) -> int:
        """1: a bar does not hold; 3: a bar without verdict; 0: every bar holds."""
        if any(result.holds is False for result in self.results):
            return 1
        return 3 if any(result.undecided for result in self.results) else 0

    def to_json(self) -> str:
        """The report as JSON text, its keys in the order of the form."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that ``text`` holds; anything else is refused with the place named."""
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise _misfit("report", f"is not JSON ({error})") from None
        top = _fields("report", tree, Report)
        head = _fields("header", top["header"], Header)
        head["machine"] = Machine(**_fields("machine", head["machine"], Machine))
        _typed("versions", head["versions"], dict)
        head["seeds"] = tuple(_typed("seeds", s, int) for s in _typed("seeds", head["seeds"], list))
        rows = _typed("results", top["results"], list)
        return cls(Header(**head), tuple(_result(i, row) for i, row in enumerate(rows)))


def _misfit(where: str, why: str) -> BadArgument:
    return BadArgument(f"benchmark report: {where}", why)


def _result(index: int, row: Any) -> Result:
    fields = _fields(f"results[{index}]", row, Result)
    if fields["interval"] is not None:
        ends = _typed("interval", fields["interval"], list)
        if len(ends) != 2:
            raise _misfit("interval", f"has {len(ends)} ends, not 2")
        fields["interval"] = Interval(*(_typed("interval", end, float) for end in ends))
    return Result(**fields)


_KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


def _fields(where: str, tree: Any, kind: type) -> dict[str, Any]:
    """The members of a JSON object, which must be exactly the fields of ``kind``."""
    _typed(where, tree, dict)
    declared = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if tree.keys() != declared.keys():
        odd = sorted(tree.keys() ^ declared.keys())
        raise _misfit(where, f"must have exactly {', '.join(declared)}; differs in {odd}")
    for name, text in declared.items():
        base, _, optional = text.partition(" | ")
        if base in _KINDS and not (optional and tree[name] is None):
            _typed(f"{where}.{name}", tree[name], _KINDS[base])
    return dict(tree)


def _typed(where: str, value: Any, kind: type) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise _misfit(where, f"{value!r} is not of type {kind.__name__}")
    return value
