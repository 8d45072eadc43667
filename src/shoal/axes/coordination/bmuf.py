"""Average models every few steps, and carry on in the direction the average took.

After a block of local steps the mean change G of all workers is filtered by a momentum of its own:
``D <- momentum D + rate G``, and every worker goes on from ``x + D``. What blocks have in common
adds up, so fewer of them are needed than with plain averaging, above all while the loss still falls
fast and each worker's own steps are small or noisy; not where the optimizer has much momentum of
its own (docs/log.md, 2026-11-16).

References:
    Chen & Huo, `Scalable training of deep learning machines by incremental block training with
    intra-block parallel optimization and blockwise model-update filtering
    <https://doi.org/10.1109/ICASSP.2016.7472805>`_, 2016 (classical block momentum).
"""

from __future__ import annotations

from shoal.axes.coordination.coordination import Coordination, Outer, complete
from shoal.errors import BadArgument
from shoal.notation import is_number, typed


def bmuf(momentum: float | None = None, rate: float = 1.0) -> Coordination:
    """Agree with all on what a block of steps changed, filtered by block momentum.

    The block is synchrony's: ``bmuf, local(8)``.

    Args:
        momentum: what is carried on of the move before, D; 1 - 1/n for n workers if left out, as
            the paper advises.
        rate: how much of a new block's mean change is taken.

    Example: ``bmuf``, ``bmuf(0.5, 0.8)``.
    """
    call = f"bmuf({momentum}, {rate})"
    if momentum is not None and not (is_number(momentum) and 0 <= momentum < 1):
        raise BadArgument(call, "momentum must be a number from 0 to under 1")
    if not (is_number(rate) and 0 < rate <= 2):
        raise BadArgument(call, "rate must be a number over 0, and 2 at most")
    told = [] if momentum is None else [typed(momentum)]
    if rate != 1:
        told.append(typed(rate) if told else f"rate={typed(rate)}")
    name = f"bmuf({', '.join(told)})" if told else "bmuf"
    return Coordination(name, "collective", "delta", complete, outer=Outer(momentum, rate))
