"""Plots of the suite ``collectives``: time over size, one file a collective and number of ranks.

All is read from the report, so plots can be drawn again from its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shoal.bench.form import Report
from shoal.bench.plot import write_plot

_TIME, _BANDWIDTH = ": time", ": bus bandwidth"
_CASE = re.compile(r"(\d+) (B|KB|MB|GB), (\d+) ranks")  # a control says more, and is left out
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
Series = dict[str, list[tuple[float, float]]]


def draw(report: Report, folder: Path) -> Iterator[Path]:
    """Write the plots of a report into a folder, and say where they are."""
    for (name, ranks), series in collected(report).items():
        path = folder / f"{re.sub('[^a-z_]+', '-', name)}-{ranks}-ranks.svg"
        write_plot(path, f"{name}, {ranks} ranks", "bytes of the message", "microseconds", series)
        yield path


def collected(report: Report) -> dict[tuple[str, str], Series]:
    """By collective and ranks: (bytes, microseconds) of shoal and of each peer."""
    found: dict[tuple[str, str], Series] = {}
    ours: dict[tuple[str, str], float] = {}
    for row in report.results:
        case, name = _CASE.fullmatch(row.case), row.metric.partition(": ")[0]
        if case is None or row.ratio is None or row.against is None:
            continue
        nbytes, series = int(case[1]) * _UNITS[case[2]], found.setdefault((name, case[3]), {})
        if row.metric.endswith(_TIME) and (name, row.case) not in ours:
            ours[name, row.case] = row.value
            series.setdefault("shoal", []).append((nbytes, row.value))
        if row.metric.endswith((_TIME, _BANDWIDTH)) and (name, row.case) in ours:
            taken = ours[name, row.case] / row.ratio
            series.setdefault(row.against, []).append((nbytes, taken))
    return found
