"""A batch is cut once."""

from __future__ import annotations

import pytest
import torch

import shoal
from shoal.errors import UsageError
from shoal.testing.trainer import digits, tiny


def test_micro_inside_micro_is_refused() -> None:
    model, optimizer = tiny()
    run = shoal.distribute(model, optimizer, loss=torch.nn.functional.cross_entropy)
    outer = run.micro(digits(8)[0], parts=2)
    micro = next(outer)
    with pytest.raises(UsageError, match="weighed twice"):
        next(run.micro(micro, parts=2))
