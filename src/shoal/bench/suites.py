"""Define a suite (a named generator of results), and run one to get its report."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from shoal.bench.report import Header, Machine, Report, Result
from shoal.cores import usable_cores

Progress = Callable[[str, int, int], None]
"""Called with (what is measured, number of parts done, number of all parts) while a suite runs."""


def silent(what: str, done: int, total: int) -> None:
    """Do nothing: the progress is not shown."""


@dataclass(frozen=True)
class BenchSettings:
    """How to run a suite."""

    quick: bool = False  # measure fewer cases and blocks, to end within a minute
    seed: int = 0  # seed of data and initial parameters
    progress: Progress = silent

    def seeds(self, count: int) -> range:
        """Return ``count`` consecutive seeds that start at ``seed``; only one if ``quick``."""
        return range(self.seed, self.seed + (1 if self.quick else count))


@dataclass(frozen=True)
class Suite:
    """A named set of measurements.

    ``run`` yields each result as soon as it is known. ``draw`` writes plots of a report into a
    folder and returns their paths. ``seeds`` is how many seeds the suite uses if not quick.
    """

    name: str
    summary: str  # one line for ``shoal bench --list``
    run: Callable[[BenchSettings], Iterable[Result]]
    draw: Callable[[Report, Path], Iterable[Path]] | None = None
    seeds: int = 1


class Stopped(KeyboardInterrupt):
    """The user pressed Ctrl-C during a suite; ``report`` has the results up to then."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def run(suite: Suite, settings: BenchSettings) -> Report:
    """Run a suite and return its report.

    Raises:
        Stopped: the user pressed Ctrl-C; the exception contains the results so far.
    """
    head = header(suite.name, tuple(settings.seeds(suite.seeds)))
    results: list[Result] = []
    try:
        for result in suite.run(settings):
            results.append(result)
    except KeyboardInterrupt as stop:
        raise Stopped(Report(head, tuple(results))) from stop
    return Report(head, tuple(results))


def header(suite: str, seeds: tuple[int, ...]) -> Header:
    """Return the header of a report, with the present time and this machine."""
    import torch

    import shoal

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions["shoal"] = shoal.__version__
    return Header(
        suite=suite,
        commit=_commit(Path(__file__).parent),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions,
        seeds=seeds,
    )


def machine() -> Machine:
    """Return a description of this machine."""
    kernel = f"{platform.system()} {platform.release()}"
    return Machine(_cpu(), usable_cores(), _memory_nbytes(), kernel)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _memory_nbytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _commit(folder: Path) -> str:
    """Return the git commit of the sources, with ``-dirty`` if edited; "unknown" without git."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout.strip() if done.returncode == 0 else ""

    describe = ("describe", "--always", "--exclude=*", "--abbrev=40", "--dirty")
    try:
        # An installed copy may be in the repository of another project, whose commit is wrong.
        ours = git("ls-files", Path(__file__).name)
        return (ours and git(*describe)) or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
