"""Half precision: cast each number to 16 bits, compute the mean in 16 bits, and cast it back.

References:
    Micikevicius et al., `Mixed precision training <https://arxiv.org/abs/1710.03740>`_, 2018.
"""

from __future__ import annotations

import torch

from shoal.axes.compression.compressor import Compressor, Trait, Value, add_dense
from shoal.errors import BadArgument
from shoal.flow import Agreed, Dense, Flow, Mean

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def cast(dtype: str = "bfloat16") -> Compressor:
    """Cast each number to 16 bits and send it. The lower bits are lost.

    Args:
        dtype: ``float16`` (more precise, inf above 65504) or ``bfloat16`` (same range as float32).

    Example: ``cast(bfloat16)``, ``cast(float16)``.
    """
    if dtype not in DTYPES:
        raise BadArgument(f"cast({dtype})", f"dtype must be one of {', '.join(DTYPES)}")
    narrow = DTYPES[dtype]

    def flow(value: Value, state: None, round: int) -> Flow:
        sent = value.tensor.to(narrow)
        mine = Dense(sent.to(value.tensor.dtype, copy=True))  # the wire may overwrite ``sent``
        mean = yield Mean(sent)
        return Agreed(mean.to(value.tensor.dtype), mine, state=None)

    traits = Trait.CONTRACTIVE | Trait.SLICEABLE | Trait.ELEMENTWISE | Trait.ONE_SHOT | Trait.SUMS
    return Compressor(f"cast({dtype})", traits, flow, add=add_dense)
