"""The report that every benchmark writes: a header, and a list of results with their thresholds.

Each result contains its threshold, so that a file can be judged without the code that wrote it.
``Report.from_json(report.to_json())`` equals ``report``. A file must have exactly the fields of the
classes below; ``_KEYS`` lists the fields that have another name in files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from shoal.errors import BadArgument

_RELATIONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_THRESHOLD = re.compile(r"(<=|>=|<|>)\s*(\S+)")
_KEYS = {"threshold": "bar", "passes": "holds"}  # name of a field -> its key in JSON files
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance from ``low`` to ``high``."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Threshold:
    """A limit for a number, such as ``<= 1.02``.

    >>> Threshold.parse("<= 1.02").met(1.03), Threshold.parse("<= 1.02").met(1.03, slack=0.02)
    (False, True)
    """

    relation: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Return the threshold that ``text`` states."""
        match = _THRESHOLD.fullmatch(text.strip()) if isinstance(text, str) else None
        try:
            limit = float(match[2]) if match else math.nan
        except ValueError:
            limit = math.nan
        if match is None or not math.isfinite(limit):
            why = 'a threshold must be one of <=, >=, <, > and a number, as in "<= 1.02"'
            raise BadArgument(f"Threshold.parse({text!r})", why)
        return cls(match[1], limit)

    def met(self, number: float, *, slack: float = 0.0) -> bool:
        """Return whether ``number`` meets the threshold after ``slack`` has made it easier."""
        widened = self.limit + slack if self.relation.startswith("<") else self.limit - slack
        return bool(_RELATIONS[self.relation](number, widened))

    def __str__(self) -> str:
        return f"{self.relation} {self.limit:g}"


@dataclass(frozen=True)
class Result:
    """One measured number, and what it was compared with.

    ``interval`` and ``threshold`` refer to the ratio if there is one, else to the value.

    Attributes:
        case: what was measured, such as the name of the model.
        metric: which quantity was measured, such as ``step time``.
        value: the measured number, in ``unit``.
        unit: such as ``ms``; empty for a pure number.
        against: name of the peer or bound that was measured in the same run.
        ratio: value divided by that of ``against``. For times that are measured in blocks, and
            also for bandwidths, it is the median over blocks of own time / time of ``against``.
        interval: 95 % confidence interval.
        threshold: as text, such as ``<= 1.02``.
        passes: whether the threshold is met. It is None if there is no threshold, or if noise
            allows no verdict.
    """

    case: str
    metric: str
    value: float
    unit: str
    against: str | None = None
    ratio: float | None = None
    interval: Interval | None = None
    threshold: str | None = None
    passes: bool | None = None

    def __post_init__(self) -> None:
        for name in ("case", "metric"):
            if not getattr(self, name):
                raise _misfit(name, "it must not be empty")
        for name, number in (("value", self.value), ("ratio", self.ratio)):
            if number is not None and not math.isfinite(number):
                raise _misfit(name, f"{number} is not a finite number")
        if (self.against is None) != (self.ratio is None):
            raise _misfit("ratio", "ratio and against must be given together")
        if self.interval is not None and not self.interval.low <= self.interval.high:
            raise _misfit("interval", f"in {tuple(self.interval)}, low is not <= high")
        if self.threshold is not None:
            Threshold.parse(self.threshold)
        elif self.passes is not None:
            raise _misfit(
                _KEYS["passes"], f"it is set, but {_KEYS['threshold']}, the threshold, is not"
            )

    @property
    def inconclusive(self) -> bool:
        """Whether there is a threshold, but the measurement was too noisy to decide."""
        return self.threshold is not None and self.passes is None


@dataclass(frozen=True)
class Machine:
    """The machine on which a measurement was made."""

    cpu: str
    cores: int
    memory_nbytes: int
    kernel: str


@dataclass(frozen=True)
class Header:
    """Suite, commit, date, machine, versions and seeds of a report."""

    suite: str
    commit: str
    date: str
    machine: Machine
    versions: Mapping[str, str]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.suite:
            raise _misfit("suite", "it must not be empty")
        try:
            zone = datetime.fromisoformat(self.date).tzinfo
        except ValueError:
            zone = None
        if zone is None:
            raise _misfit("date", f"{self.date!r} is not an ISO 8601 date with its time zone")
        missing = {"python", "torch", "shoal"} - set(self.versions)
        if missing:
            raise _misfit("versions", f"it must contain {', '.join(sorted(missing))}")


@dataclass(frozen=True)
class Report:
    """A header and the results."""

    header: Header
    results: tuple[Result, ...]

    @property
    def exit_code(self) -> int:
        """1 if a threshold is not met, or else 3 if one is inconclusive, or else 0."""
        if any(result.passes is False for result in self.results):
            return 1
        return 3 if any(result.inconclusive for result in self.results) else 0

    def to_json(self) -> str:
        """Return the report as JSON text, with keys in the order of the fields."""
        tree = dataclasses.asdict(self)
        tree["results"] = [{_KEYS.get(k, k): v for k, v in row.items()} for row in tree["results"]]
        return json.dumps(tree, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that ``text`` contains; a BadArgument names the first wrong field."""
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise _misfit("report", f"it is not JSON ({error})") from None
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
            raise _misfit("interval", f"it has {len(ends)} ends, not 2")
        fields["interval"] = Interval(*(_typed("interval", end, float) for end in ends))
    return Result(**fields)


def _fields(where: str, tree: Any, kind: type) -> dict[str, Any]:
    """Return the values of a JSON object, whose keys must be exactly the fields of ``kind``."""
    _typed(where, tree, dict)
    declared = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    keys = {_KEYS.get(name, name): name for name in declared}
    if tree.keys() != keys.keys():
        odd = sorted(tree.keys() ^ keys.keys())
        raise _misfit(
            where, f"it must have exactly the keys {', '.join(keys)}; missing or unknown: {odd}"
        )
    for key, name in keys.items():
        base, _, optional = declared[name].partition(" | ")
        if base in _TYPES and not (optional and tree[key] is None):
            _typed(f"{where}.{key}", tree[key], _TYPES[base])
    return {name: tree[key] for key, name in keys.items()}


def _typed(where: str, value: Any, kind: type) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise _misfit(where, f"{value!r} is not of type {kind.__name__}")
    return value
