"""Benchmarks: one form, one way to measure, and the suites.

A new suite is one file and one line of ``SUITES``; it then shows in ``shoal bench --list``.
"""

from __future__ import annotations

from shoal.bench import collectives, convergence, exchange, overhead, routes
from shoal.bench.suites import Suite
from shoal.errors import UnknownName

SUITES: tuple[Suite, ...] = (
    overhead.SUITE,
    collectives.SUITE,
    routes.SUITE,
    exchange.SUITE,
    convergence.SUITE,
)


def find(name: str) -> Suite:
    """The suite of that name."""
    for suite in SUITES:
        if suite.name == name:
            return suite
    raise UnknownName("suite", name, (suite.name for suite in SUITES))
