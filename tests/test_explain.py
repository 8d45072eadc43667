"""A strategy in words: what is said is what is done."""

from __future__ import annotations

import pytest

from shoal.explain import explain
from shoal.strategy import parse


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("all_reduce", "the gradient"),
        ("parameter_server, asp", "the gradient"),
        ("parameter_server, ssp(2)", "the gradient"),
        ("local(4)", "the change"),
        ("bmuf, local(4)", "the change"),
        ("gossip, local(4)", "the model"),
        ("gossip, asp", "the model"),
    ],
)
def test_what_is_sent_is_what_the_step_agrees_on(text: str, what: str) -> None:
    told = explain(parse(text), 4)
    assert told.sends[0].startswith(what)
    if "gradient" in what:
        assert any("gradient to" in line or "on the gradient" in line for line in told.step)


def test_block_momentum_is_told_in_numbers() -> None:
    told = explain(parse("bmuf, local(4)"), 4).step[-1]
    assert told.endswith("moves by 1 of the mean change and 0.75 of the previous move")
    assert "0.5 of the previous move" in explain(parse("bmuf(0.5), local(4)"), 4).step[-1]


def test_neighbours_that_meet_seldom_send_seldom() -> None:
    step = explain(parse("gossip, local(4)"), 4).step
    (sends,) = (line for line in step if line.startswith("sends its model"))
    assert sends.endswith(", every 4th step")
    assert "every" not in "".join(explain(parse("gossip"), 4).step)


@pytest.mark.parametrize(("steps", "word"), [(2, "2nd"), (3, "3rd"), (11, "11th"), (21, "21st")])
def test_steps_are_counted_as_people_do(steps: int, word: str) -> None:
    assert f"on every {word} step" in explain(parse(f"local({steps})"), 2).step[-1]


def test_a_layers_part_is_a_share() -> None:
    assert any("its share, 1/2, of each layer" in s for s in explain(parse("tensor(2)"), 2).step)
