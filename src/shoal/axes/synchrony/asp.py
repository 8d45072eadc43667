"""Asynchronous: nobody waits for anybody.

References:
    Dean et al., `Large scale distributed deep networks
    <https://papers.nips.cc/paper/2012/hash/6aca97005c68f1206823815f66102863-Abstract.html>`_, 2012
    (Downpour SGD).
"""

from __future__ import annotations

import math

from shoal.axes.synchrony.synchrony import Synchrony


def asp() -> Synchrony:
    """Never wait: every worker goes on with what is there."""
    return Synchrony("asp", 1, math.inf)
