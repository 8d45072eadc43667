"""Pictures of races: held-out loss against seconds of training, of all contenders.

Curves are in no report, so pictures are written as soon as a race is over, under ``shoal-runs``;
where a report is kept, copies go beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from shutil import copyfile

from shoal.bench.exchange.contenders import DDP
from shoal.bench.exchange.judge import Field, Run
from shoal.bench.form import Report
from shoal.bench.plot import Points, write_plot

FOLDER = Path("shoal-runs")
GOAL = "the loss to reach"


def draw(case: str, field: Field) -> Path:
    """Loss against time of all, those that came first at the head of the legend."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / ("exchange-" + case.replace(", ", "-").replace(" ", "-") + ".svg")
    series: dict[str, Points] = {}
    for run in sorted(field.runs.values(), key=_rank):
        series[label(run)] = [(seconds, loss) for _, seconds, loss in run.curve if seconds > 0]
    times = [seconds for points in series.values() for seconds, _ in points]
    target = field.runs[DDP].target
    series[GOAL] = [(min(times), target), (max(times), target)]
    title = f"{case}: held-out loss, smoothed, against time"
    write_plot(path, title, "seconds of training", "held-out loss", series)
    return path


def _rank(run: Run) -> tuple[bool, float, str]:
    there = run.reached or run.contender == DDP  # which defines it
    return not there, run.seconds, run.contender


def label(run: Run) -> str:
    """A contender's name without what all share, and how it ended."""
    name = run.contender.removeprefix("all_reduce, ")
    if run.contender == DDP:
        return name
    return f"{name}: {run.seconds:.3g} s" if run.reached else f"{name}: not reached"


def gather(report: Report, folder: Path) -> Iterator[Path]:
    """Copies of the pictures that were drawn for a report."""
    begun = datetime.fromisoformat(report.header.date).timestamp()
    for path in sorted(FOLDER.glob("exchange-*.svg")):
        if path.stat().st_mtime >= begun:
            yield Path(copyfile(path, folder / path.name))
