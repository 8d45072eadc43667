"""Every technique keeps the laws of its axis; whoever is listed is tested."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from shoal.axes import AXES, FUNCTIONS, QUESTIONS, axis_of, catalogue
from shoal.testing.contracts import check_member, laws_of, make, samples

SAMPLES = {text: make(text) for f in FUNCTIONS.values() for text in samples(f)}
PAIRS = [(text, law) for text, value in SAMPLES.items() for law in laws_of(value)]

each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda f: f.__name__)


@pytest.mark.parametrize(("text", "law"), PAIRS, ids=[f"{t}-{law.__name__}" for t, law in PAIRS])
def test_law(text: str, law: Callable[[Any], None]) -> None:
    law(SAMPLES[text])


@each_function
def test_it_shows_at_least_one_sample(function: Callable[..., Any]) -> None:
    assert samples(function)


@each_function
def test_its_samples_read_back_as_they_are_written(function: Callable[..., Any]) -> None:
    for text in samples(function):
        assert make(repr(SAMPLES[text])) == SAMPLES[text]


@each_function
def test_it_lives_in_a_file_of_its_name(function: Callable[..., Any]) -> None:
    assert function.__module__ == f"shoal.axes.{axis_of(function.__name__)}.{function.__name__}"


@each_function
def test_its_module_names_its_references(function: Callable[..., Any]) -> None:
    module = inspect.getmodule(function)
    assert module is not None
    assert "References:" in (module.__doc__ or "")


@each_function
def test_every_parameter_is_explained(function: Callable[..., Any]) -> None:
    told = inspect.getdoc(function) or ""
    for name in inspect.signature(function).parameters:
        assert f"    {name}: " in told


def test_names_are_unique_over_all_axes() -> None:
    names = Counter(f.__name__ for functions in AXES.values() for f in functions)
    assert set(names.values()) == {1}
    assert set(names) == set(FUNCTIONS)


def test_every_axis_asks_a_question_and_has_a_plain_answer() -> None:
    assert list(AXES) == list(QUESTIONS)
    for functions in AXES.values():
        first = functions[0]
        assert all(p.default is not p.empty for p in inspect.signature(first).parameters.values())


def test_the_catalogue_tells_a_paper_and_a_link_for_each() -> None:
    members = catalogue()
    assert [m.name for m in members] == list(FUNCTIONS)
    for member in members:
        assert member.summary.endswith(".")
        assert member.link.startswith("https://"), member
        assert member.paper[-4:].isdigit(), member


def test_a_whole_member_is_checked_in_one_call() -> None:
    for name in ("asp", "data", "native", "gossip"):
        check_member(FUNCTIONS[name])
