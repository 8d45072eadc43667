"""No compression: send tensors in their own dtype.

References:
    Li et al., `PyTorch Distributed <https://arxiv.org/abs/2006.15704>`_, 2020 (what DDP sends).
"""

from __future__ import annotations

from shoal.axes.compression.compressor import Compressor, Trait, Value, add_dense
from shoal.flow import Agreed, Dense, Flow, Mean


def exact() -> Compressor:
    """Send tensors uncompressed, in their own dtype. Nothing is lost."""

    def flow(value: Value, state: None, round: int) -> Flow:
        mean = yield Mean(value.tensor)
        return Agreed(mean, Dense(value.tensor), state=None)

    traits = Trait.LOSSLESS | Trait.UNBIASED | Trait.SLICEABLE | Trait.ELEMENTWISE
    return Compressor("exact", traits | Trait.ONE_SHOT | Trait.SUMS, flow, add=add_dense)
