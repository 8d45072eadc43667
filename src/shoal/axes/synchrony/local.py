"""Local SGD: several steps alone, then one average.

References:
    Stich, `Local SGD converges fast and communicates little <https://arxiv.org/abs/1805.09767>`_,
    2019.
    McMahan et al., `Communication-efficient learning of deep networks from decentralized data
    <https://arxiv.org/abs/1602.05629>`_, 2017.
"""

from __future__ import annotations

from shoal.axes.synchrony.synchrony import Synchrony
from shoal.errors import BadArgument


def local(steps: int) -> Synchrony:
    """Take ``steps`` steps alone, then agree on what they changed.

    Args:
        steps: 1 is bsp; more talks less and drifts further.

    Example: ``local(1)``, ``local(4)``.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise BadArgument(f"local({steps})", "steps must be a whole number >= 1")
    return Synchrony(f"local({steps})", steps)
