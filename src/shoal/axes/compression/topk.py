"""Top-k sparsification: send the k entries of largest magnitude, and drop the rest.

References:
    Aji & Heafield, `Sparse communication for distributed gradient descent
    <https://arxiv.org/abs/1704.05021>`_, 2017.
    Stich et al., `Sparsified SGD with memory <https://arxiv.org/abs/1809.07599>`_, 2018 (why it
    needs error feedback).
"""

from __future__ import annotations

from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.kit.select import top_k
from shoal.axes.compression.kit.sparse import add, check_ratio, send, share
from shoal.flow import Agreed, Flow
from shoal.notation import typed


def topk(ratio: float) -> Compressor:
    """Send the entries of largest magnitude and drop the rest; use it with ``error_feedback``.

    Args:
        ratio: share of the entries to send, in (0, 1]; at least one entry is sent.

    Example: ``topk(0.25)``, ``topk(1)``.
    """
    check_ratio("topk", ratio)

    def flow(value: Value, state: None, round: int) -> Flow:
        row = value.tensor.reshape(-1)  # (numel,)
        where, values = top_k(row, share(ratio, row.numel()))  # (k,), (k,)
        mean, mine = yield from send(where, values, value.tensor)
        return Agreed(mean, mine, state=None)

    traits = Trait.CONTRACTIVE | Trait.SLICEABLE | Trait.ONE_SHOT
    return Compressor(f"topk({typed(ratio)})", traits, flow, add=add)
