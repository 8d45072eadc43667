"""Acceptance benchmarks of the project, run from a source checkout by ``shoal bench NAME``."""

from __future__ import annotations

from benchmarks import convergence
from benchmarks.exchange import suite as exchange
from shoal.bench.suites import Suite

SUITES: tuple[Suite, ...] = (exchange.SUITE, convergence.SUITE)
