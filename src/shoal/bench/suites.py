"""What a suite is, and how one is run: a generator of results, and a header around them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from shoal.bench.form import Header, Machine, Report, Result
from shoal.cores import usable_cores

Progress = Callable[[str, int, int], None]
"""Told (what is being measured, parts done, parts in all) as a suite goes on."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Settings:
    """How to run a suite.

    Attributes:
        quick: end within a minute: fewer cases and blocks.
        seed: of data and initial parameters.
        progress: called as the suite goes on.
    """

    quick: bool = False
    seed: int = 0
    progress: Progress = silent

    def seeds(self, count: int) -> range:
        """So many seeds from the first on; only that one if quick."""
        return range(self.seed, self.seed + (1 if self.quick else count))


@dataclass(frozen=True)
class Suite:
    """A named set of measurements.

    Attributes:
        name: what one types.
        summary: one line for ``shoal bench --list``.
        run: yields each result as soon as it is known.
        draw: writes plots of a report into a folder, and says where they are.
        seeds: how many it takes, from the one in its settings on; one if quick.
    """

    name: str
    summary: str
    run: Callable[[Settings], Iterable[Result]]
    draw: Callable[[Report, Path], Iterable[Path]] | None = None
    seeds: int = 1


class Stopped(KeyboardInterrupt):
    """Somebody pressed Ctrl-C; what was measured until then is in ``report``."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def run(suite: Suite, settings: Settings) -> Report:
    """Run a suite to its end.

    Raises:
        Stopped: Ctrl-C; it holds the results so far.
    """
    begun = header(suite.name, tuple(settings.seeds(suite.seeds)))
    results: list[Result] = []
    try:
        for result in suite.run(settings):
            results.append(result)
    except KeyboardInterrupt as stop:
        raise Stopped(Report(begun, tuple(results))) from stop
    return Report(begun, tuple(results))


def header(suite: str, seeds: tuple[int, ...]) -> Header:
    """The header of a report that begins now, on this machine."""
    import torch

    import shoal

    return Header(
        suite=suite,
        commit=_commit(Path(__file__).parent),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine(),
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "shoal": shoal.__version__,
        },
        seeds=seeds,
    )


def machine() -> Machine:
    """This machine."""
    return Machine(
        cpu=_cpu(),
        cores=usable_cores(),
        memory_nbytes=_memory_nbytes(),
        kernel=f"{platform.system()} {platform.release()}",
    )


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
    """The commit of the sources measured, ``-dirty`` when edited since; unknown outside of git."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=20,
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    describe = ("describe", "--always", "--exclude=*", "--abbrev=40", "--dirty")
    try:
        # An installed copy may lie inside somebody else's repository, which is not our commit.
        ours = git("ls-files", Path(__file__).name)
        return (ours and git(*describe)) or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
