"""Every example inside a docstring gives what it shows."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import shoal

FOUND = ["shoal", *(found.name for found in pkgutil.walk_packages(shoal.__path__, "shoal."))]
MODULES = [name for name in FOUND if not name.endswith("__main__")]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_what_a_docstring_shows_is_what_one_gets(name: str) -> None:
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in examples(name):
        runner.run(test, out=told.append)
    assert runner.failures == 0, "".join(told)


def test_there_are_docstrings_that_show_something() -> None:
    assert sum(bool(examples(name)) for name in MODULES) >= 4
