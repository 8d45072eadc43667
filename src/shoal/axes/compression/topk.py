"""Top-k sparsification: send the k largest entries, forget the rest.

References:
    Aji & Heafield, `Sparse communication for distributed gradient descent
    <https://arxiv.org/abs/1704.05021>`_, 2017.
    Stich et al., `Sparsified SGD with memory <https://arxiv.org/abs/1809.07599>`_, 2018 (why it
    needs error feedback).
"""

from __future__ import annotations

from torch import Tensor

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.residual import plus, zeros
from shoal.axes.compression.kit.select import largest_entries
from shoal.axes.compression.kit.sparse import add, check_ratio, flat, send, share
from shoal.flow import Agreed, Flow
from shoal.notation import typed


def topk(ratio: float) -> Compressor:
    """Keep the ``ratio`` largest entries in magnitude; wrap it in ``error_feedback``.

    Args:
        ratio: share of the entries that is sent, in (0, 1]; at least one entry.

    Example: ``topk(0.25)``, ``topk(1)``.
    """
    check_ratio("topk", ratio)
    name = f"topk({typed(ratio)})"
    traits = Trait.CONTRACTIVE | Trait.SLICEABLE | Trait.ONE_SHOT

    def flow(value: Value, state: None, round: int) -> Flow:
        row = flat(value.tensor)  # (numel,)
        where, values = largest_entries(row, share(ratio, row.numel()))  # (k,), (k,)
        mean, mine = yield from send(where, values, value.tensor)
        return Agreed(mean, mine, state=None)

    def init(value: Value) -> tuple[Tensor, None]:
        return zeros(value.tensor), None

    def fed(value: Value, state: tuple[Tensor, None], round: int) -> Flow:
        wanted, row = plus(value.tensor, state[0])
        where, values = largest_entries(row, share(ratio, row.numel()))
        mean, mine = yield from send(where, values, value.tensor)
        row.index_fill_(0, where, 0)  # what was sent was sent exactly: the rest is the residual
        return Agreed(mean, mine, (wanted, None))

    conserving = traits | Trait.CONSERVING
    feedback = Compressor(f"error_feedback({name})", conserving, fed, init, add)
    return Compressor(name, traits, flow, add=add, feedback=feedback)
