"""The lockstep trainer trains by the strategy that it has."""

from __future__ import annotations

import doctest
import math

import pytest
import torch

import shoal.testing.trainer
from shoal.strategy import parse
from shoal.testing.trainer import LockstepTrainer, digits, tiny


def test_the_example_in_its_docstring_holds() -> None:
    assert doctest.testmod(shoal.testing.trainer).failed == 0


def test_models_and_data_are_the_same_every_time() -> None:
    for one, other in zip(tiny()[0].parameters(), tiny()[0].parameters(), strict=True):
        assert torch.equal(one, other)
    for (x, y), (u, v) in zip(digits(9, batches=2), digits(9, batches=2), strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)


@pytest.mark.parametrize("text", ["bsp", "gossip", "gossip, asp", "parameter_server, ssp(1)"])
def test_the_same_run_gives_the_same_bits(text: str) -> None:
    one, other = (LockstepTrainer(parse(text), workers=3, build=tiny) for _ in range(2))
    assert one.train(digits(12), steps=5) == other.train(digits(12), steps=5)
    for worker in range(3):
        for name, p in one.parameters(worker).items():
            assert torch.equal(p, other.parameters(worker)[name])


def test_the_loss_is_that_of_the_whole_batch() -> None:
    (x, y), *_ = digits(7)
    model, _ = tiny()
    expected = torch.nn.functional.cross_entropy(model(x), y).item()
    for workers in (1, 2, 3, 9):
        school = LockstepTrainer(parse("bsp"), workers=workers, build=tiny)
        assert math.isclose(school.step((x, y)), expected, rel_tol=1e-12)


def test_parameters_are_copies() -> None:
    school = LockstepTrainer(parse("bsp"), workers=1, build=tiny)
    school.parameters()["0.weight"].zero_()
    assert school.parameters()["0.weight"].any()


def test_replicas_that_agree_hold_the_same_bits() -> None:
    for text in ("bsp", "error_feedback(topk(0.25))", "cast", "error_feedback(powersgd(2))"):
        school = LockstepTrainer(parse(text), workers=4, build=tiny)
        school.train(digits(10), steps=4)
        for worker in (1, 2, 3):
            for name, p in school.parameters().items():
                assert torch.equal(p, school.parameters(worker)[name]), text
