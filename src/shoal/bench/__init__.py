"""Benchmarks: the suites that ``shoal bench`` runs, how they measure, and their report.

To add a suite, write a module with a :class:`Suite` and add it to ``SUITES``; then ``shoal bench
--list`` shows it. The acceptance benchmarks of the project are not part of the package: they are in
the folder ``benchmarks`` of a source checkout, and ``shoal bench`` runs them from there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from shoal.bench import overhead, routes
from shoal.bench.collectives.suite import SUITE as COLLECTIVES
from shoal.bench.suites import Suite
from shoal.errors import UnknownName, UsageError

SUITES: tuple[Suite, ...] = (overhead.SUITE, COLLECTIVES, routes.SUITE)
CHECKOUT = Path(__file__).parents[3]
ACCEPTANCE = ("exchange", "convergence")
"""Names of the suites in a checkout's folder ``benchmarks``."""


def all_suites() -> tuple[Suite, ...]:
    """Return the suites of the package and, in a source checkout, its acceptance benchmarks."""
    folder = CHECKOUT / "benchmarks"
    if not (folder / "__init__.py").is_file():
        return SUITES
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return (*SUITES, *import_module(folder.name).SUITES)


def find(name: str) -> Suite:
    """Return the suite of that name.

    Raises:
        UsageError: it is an acceptance benchmark, and this package is not a source checkout.
        UnknownName: there is no such suite.
    """
    suites = {suite.name: suite for suite in all_suites()}
    if name in suites:
        return suites[name]
    if name in ACCEPTANCE:
        raise UsageError(
            f"shoal bench {name}: this acceptance benchmark is not part of the installed package, "
            f"it needs a source checkout ({CHECKOUT} has no folder benchmarks); clone Shoal's "
            "repository, run `pip install -e .` there, and try again"
        )
    raise UnknownName("suite", name, suites)
