"""Asynchronous parallel: no worker waits for another.

References:
    Dean et al., `Large scale distributed deep networks
    <https://papers.nips.cc/paper/2012/hash/6aca97005c68f1206823815f66102863-Abstract.html>`_, 2012
    (Downpour SGD).
"""

from __future__ import annotations

import math

from shoal.axes.synchrony.synchrony import Synchrony


def asp() -> Synchrony:
    """Never wait: every worker continues with the newest model that it has received."""
    return Synchrony("asp", 1, math.inf)
