"""The generated pages show every technique, and every paper that is cited is known."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from shoal import axes
from shoal.strategy import parse

ROOT = Path(__file__).parents[2]
AXES = Path(axes.__file__).parent
ANSWERS = sorted(path for path in AXES.glob("*/*.py") if path.stem in axes.FUNCTIONS)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def links(text: str) -> list[str]:
    return re.findall(r"<(https?://[^>]+)>`_", text)


def known() -> list[str]:
    return re.findall(r"url = \{(.*?)\}\}", (AXES / "references.bib").read_text())


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_every_answer_cites_papers_that_are_in_the_bibliography(path: Path) -> None:
    _, mark, papers = path.read_text().partition("References:")
    assert mark, "the module's docstring has no References:"
    found = links(papers)
    assert found
    assert set(found) <= set(known())


def test_every_entry_of_the_bibliography_is_cited_once() -> None:
    cited = {link for path in AXES.rglob("*.py") for link in links(path.read_text())}
    assert len(known()) == len(set(known()))
    assert set(known()) <= cited
    keys = re.findall(r"^@\w+\{(\w+),", (AXES / "references.bib").read_text(), re.M)
    assert keys == sorted(keys)
    assert len(keys) == len(known())


def test_every_technique_has_its_place_on_its_axis_page(generate: ModuleType) -> None:
    pages = generate.pages()
    for member in axes.catalogue():
        page = pages[f"axes/{member.axis}.md"]
        assert f"## {member.name}\n" in page
        assert member.link in page
        assert f"({member.axis}.md#{member.name})" in pages["axes/index.md"]


def test_what_a_page_says_to_type_can_be_typed(generate: ModuleType) -> None:
    for axis in axes.AXES:
        for line in re.findall(r"^Typed as: (.*?)\. Source", generate.axis_page(axis), re.M):
            for text in re.findall(r"`(.+?)`", line):
                made = generate.call(text, axes.FUNCTIONS, "technique")
                assert repr(made)


def test_a_cross_in_the_table_is_a_conflict_and_a_dot_is_none(generate: ModuleType) -> None:
    together, nearest = generate.legal()
    shown = {repr(a): a for found in generate.rows().values() for a in found}
    assert (shown["all_reduce"], shown["asp"]) not in together
    assert nearest[shown["all_reduce"], shown["asp"]].instead
    assert (shown["all_reduce"], shown["local(4)"]) in together
    assert parse("all_reduce, local(4)")


def test_every_entry_has_its_line_on_the_page_of_papers(generate: ModuleType) -> None:
    page = generate.references()
    assert [url for url in known() if f"]({url})" not in page] == []
