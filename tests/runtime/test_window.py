"""No more messages are under way than a schedule's credit allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.axes.compression import exact
from shoal.axes.scheduling import priority
from shoal.flow import Mean
from shoal.runtime.step.buffers import FlatBuffers
from shoal.runtime.step.engine import Engine
from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.stats import EMPTY_REPORT


class Counting:
    """A wire that answers with what it was given, and counts what nobody has waited for yet."""

    size, blocks = 2, False

    def __init__(self) -> None:
        self.under_way = self.most = self.asked = 0

    def ask(self, ask: Any) -> Answer:
        assert isinstance(ask, Mean)
        self.asked += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return Answer(self, ask.tensor)

    def leave(self) -> None:
        """Nobody is left."""


class Answer:
    """What comes back, once it is waited for."""

    def __init__(self, wire: Counting, tensor: Tensor) -> None:
        self._wire, self._tensor = wire, tensor

    def wait(self) -> Tensor:
        self._wire.under_way -= 1
        return self._tensor


@pytest.mark.parametrize(("credit", "most"), [(256, 1), (512, 2), (1024, 4), (0, 12)])
def test_messages_under_way_are_limited_by_the_credit(credit: int, most: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 32))
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    parameters = dict(model.named_parameters())
    agreement = Exchange(FlatBuffers(parameters), priority(256, credit=credit), exact())
    wire = Counting()
    engine = Engine(agreement, wire, parameters=parameters)
    for _ in range(2):
        model.zero_grad()
        engine.arm(lambda: EMPTY_REPORT)
        model(x).square().sum().backward()
        engine.send_rest(EMPTY_REPORT)
        engine.settle()
    engine.close()
    assert wire.asked == 2 * len(agreement.buckets)
    assert wire.most == most
    assert wire.under_way == 0
    for name, p in parameters.items():
        torch.testing.assert_close(p.grad, plain[name])
