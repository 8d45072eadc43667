"""BMUF: average the change of a block of local steps, and apply momentum to it.

After a block of local steps that began at model x, momentum is applied to the mean change G over
all workers: ``D <- momentum * D + rate * G``. Every worker continues from ``x + D``. Changes in the
same direction add up over blocks, so fewer blocks are needed than with plain averaging. This helps
most while the loss falls fast and steps are small or noisy. It does not help if the optimizer has
much momentum of its own (docs/log.md, 2026-11-16).

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
    """Average the change of a block of steps over all workers, and apply block momentum to it.

    The synchrony sets the number of steps in a block: 8 in ``bmuf, local(8)``.

    Args:
        momentum: factor of the previous D. By default it is 1 - 1/n for n workers, as the paper
            advises.
        rate: factor of the new mean change, G.

    Example: ``bmuf``, ``bmuf(0.5, 0.8)``.
    """
    call = f"bmuf({momentum}, {rate})"
    if momentum is not None and not (is_number(momentum) and 0 <= momentum < 1):
        raise BadArgument(call, "momentum must be a number in [0, 1)")
    if not (is_number(rate) and 0 < rate <= 2):
        raise BadArgument(call, "rate must be a number in (0, 2]")
    options = [] if momentum is None else [typed(momentum)]
    if rate != 1:
        options.append(typed(rate) if options else f"rate={typed(rate)}")
    name = f"bmuf({', '.join(options)})" if options else "bmuf"
    return Coordination(name, "collective", "delta", complete, outer=Outer(momentum, rate))
