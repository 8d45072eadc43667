"""Local SGD: several local steps, then one average.

References:
    Stich, `Local SGD converges fast and communicates little <https://arxiv.org/abs/1805.09767>`_,
    2019.
    McMahan et al., `Communication-efficient learning of deep networks from decentralized data
    <https://arxiv.org/abs/1602.05629>`_, 2017.
"""

from __future__ import annotations

from shoal.axes.synchrony.synchrony import Synchrony
from shoal.errors import BadArgument
from shoal.notation import is_whole


def local(steps: int) -> Synchrony:
    """Take ``steps`` local optimizer steps, then average what they changed over all workers.

    Args:
        steps: number of steps. 1 is like bsp. With more steps less is sent, but replicas diverge
            further.

    Example: ``local(1)``, ``local(4)``.
    """
    if not is_whole(steps, 1):
        raise BadArgument(f"local({steps})", "steps must be a whole number >= 1")
    return Synchrony(f"local({steps})", steps)
