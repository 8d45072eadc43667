"""Bulk synchronous parallel: all workers wait for all others in every step.

References:
    Valiant, `A bridging model for parallel computation <https://doi.org/10.1145/79173.79181>`_,
    1990.
"""

from __future__ import annotations

from shoal.axes.synchrony.synchrony import Synchrony


def bsp() -> Synchrony:
    """Wait for all workers in every step, as if one worker computed the whole batch."""
    return Synchrony("bsp")
