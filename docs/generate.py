"""Generate documentation pages from the code, so that they cannot be out of date.

mkdocs calls :func:`on_files` (see ``hooks:`` in mkdocs.yml). One page per axis from its docstrings,
one compatibility table from ``shoal.rules``, one list of papers from ``references.bib``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from shoal import axes
from shoal.errors import Conflict, ConflictError
from shoal.notation import call
from shoal.strategy import Strategy
from shoal.testing.contracts import matrix, samples

BIB = Path(axes.__file__).with_name("references.bib")
LINK = re.compile(r"`([^`<]+?)\s*<(https?://[^>]+)>`_")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Return every generated page by its path."""
    made = {f"axes/{axis}.md": axis_page(axis) for axis in axes.AXES}
    return {
        **made,
        "axes/index.md": overview(),
        "compatibility.md": compatibility(),
        "references.md": references(),
    }


def overview() -> str:
    """Return one page with all techniques."""
    lines = [
        "# Six questions",
        "",
        "Any way of training on many machines answers six questions, each by a technique.",
    ]
    for axis in axes.AXES:
        lines += ["", f"## [{axis}]({axis}.md): {axes.QUESTIONS[axis]}", ""]
        lines += ["| technique | in a line | paper |", "|---|---|---|"]
        for m in axes.catalogue():
            if m.axis == axis:
                paper = f"[{m.paper}]({m.link})" if m.link else m.paper
                lines.append(
                    f"| [`{m.signature}`]({axis}.md#{m.name}) | {plain(m.summary)} | {paper} |"
                )
    return "\n".join(lines) + "\n"


def axis_page(axis: str) -> str:
    """Return the page of one axis: its question, then every technique, arguments and papers."""
    package = inspect.getmodule(axes).__dict__[axis]
    lines = [f"# {axis}: {axes.QUESTIONS[axis]}", "", plain(inspect.getdoc(package) or ""), ""]
    for function in axes.AXES[axis]:
        lines += [*member(function), ""]
    lines += ["What goes with what: [compatibility](../compatibility.md).", ""]
    return "\n".join(lines)


def member(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the section of one technique."""
    module = inspect.getmodule(function)
    story, _, papers = (inspect.getdoc(module) or "").partition("References:")
    yield f"## {function.__name__}"
    yield ""
    yield f"`{function.__name__}{inspect.signature(function)}`".replace("'", "")
    yield ""
    yield plain(story.strip())
    yield ""
    yield from docstring(inspect.getdoc(function) or "")
    yield ""
    typed = ", ".join(f"`{text}`" for text in samples(function))
    yield f"Typed as: {typed}. Source: `{module.__name__ if module else ''}`."
    yield ""
    yield "References:"
    yield ""
    yield from (f"- {one}" for one in cited(papers))


def docstring(text: str) -> Iterator[str]:
    """Yield a Google-style docstring as Markdown."""
    text = re.sub(r"^Example:.*?(\n\s*\n|\Z)", "", text, flags=re.S | re.M)
    story, _, rest = text.partition("Args:")
    yield plain(story.strip())
    block, _, after = rest.partition("\n\n")
    yield ""
    for name, text in re.findall(
        r"^    (\w+): (.*?)(?=^    \w+: |\Z)", block.strip("\n"), re.S | re.M
    ):
        yield f"- `{name}`: {plain(' '.join(text.split()))}"
    if after.strip():
        yield ""
        yield plain(inspect.cleandoc(after))


def cited(papers: str) -> list[str]:
    """Return one item per paper, with Markdown links."""
    text = LINK.sub(r"[\1](\2)", " ".join(papers.split()))
    return [plain(part).strip() for part in re.split(r"(?<=\.) (?=[A-Z][\w-]+[ ,])", text) if part]


def plain(text: str) -> str:
    """Replace reStructuredText's code marks by those of Markdown."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


@cache
def legal() -> tuple[frozenset[tuple[Any, Any]], dict[tuple[Any, Any], Conflict]]:
    """Return the pairs that some strategy contains, and for all others the nearest conflict."""
    every = matrix.samples_by_axis()
    together = {pair for row in matrix.legal_products(every) for pair in combinations(row, 2)}
    rows = _nearest_rows(matrix.kinds(every))
    nearest = {}
    for one, other in combinations(range(len(every)), 2):
        for pair in product(list(every.values())[one], list(every.values())[other]):
            if pair not in together:
                row = list(rows[(one, other, *map(matrix.facts, pair))])
                row[one], row[other] = pair
                nearest[pair] = min(_conflicts(row, pair))[-1]
    return frozenset(together), nearest


def _nearest_rows(kinds: list[list[list[Any]]]) -> dict[Any, tuple[Any, ...]]:
    """Return, for any two kinds of techniques, the strategy that shows their conflict best."""
    best: dict[Any, tuple[tuple[int, int], tuple[Any, ...]]] = {}
    for row in product(*([kind[0] for kind in alike] for alike in kinds)):
        facts = [matrix.facts(technique) for technique in row]
        for (i, one), (j, other) in combinations(enumerate(row), 2):
            for *rank, _ in _conflicts(row, (one, other)):
                key, rank_row = (i, j, facts[i], facts[j]), ((rank[0], rank[1]), row)
                if key not in best or rank_row[0] < best[key][0]:
                    best[key] = rank_row
    return {key: row for key, (_, row) in best.items()}


@lru_cache(maxsize=1)
def _refusals(row: tuple[Any, ...]) -> tuple[Conflict, ...]:
    try:
        Strategy(*row)
    except ConflictError as error:
        return error.conflicts
    return ()


def _conflicts(row: Sequence[Any], pair: tuple[Any, Any]) -> list[tuple[int, int, Conflict]]:
    """Return each conflict of a row, ranked: naming the pair first, then few conflicts."""
    conflicts = _refusals(tuple(row))
    return [
        (-sum(repr(one) in each.what for one in pair), len(conflicts), each) for each in conflicts
    ]


@cache
def rows() -> Mapping[str, tuple[Any, ...]]:
    """Return the rows of the tables: samples of a technique with equal results are one row."""
    together, _ = legal()
    shown: dict[str, dict[tuple[str, frozenset[Any]], Any]] = {}
    for axis, functions in axes.AXES.items():
        shown[axis] = {}
        for function in functions:
            for text in samples(function):
                made = call(text, axes.FUNCTIONS, "technique")
                partners = {pair[made == pair[0]] for pair in together if made in pair}
                shown[axis].setdefault((function.__name__, frozenset(partners)), made)
    return {axis: tuple(dict.fromkeys(values.values())) for axis, values in shown.items()}


def compatibility() -> str:
    """Return the page of legal and illegal combinations, from the rules themselves."""
    lines = [
        "# What goes with what",
        "",
        "Made from `shoal.rules` by trying every product of the six axes. A dot: some strategy has",
        "both. A cross: none has; below the table stands why, and what to do instead. The error",
        'says the same, and so does `shoal explain "..."`.',
    ]
    for left, right in combinations(rows(), 2):
        table = crossed(rows()[left], rows()[right])
        if table:
            lines += ["", f"## {left} and {right}", "", *table]
    return "\n".join(lines) + "\n"


def crossed(left: tuple[Any, ...], right: tuple[Any, ...]) -> list[str]:
    """Return the table of two axes and its reasons; empty if every pair is legal."""
    together, nearest = legal()
    reasons: dict[tuple[str, str], dict[Any, list[str]]] = {}
    lines = ["| |" + "".join(f" `{b}` |" for b in right), "|---|" + ":-:|" * len(right)]
    for a in left:
        refused = [b for b in right if (a, b) not in together]
        lines.append(f"| `{a}` |" + "".join(" ✗ |" if b in refused else " · |" for b in right))
        for b in refused:
            _, why, instead = nearest[a, b]
            reasons.setdefault((why, instead), {}).setdefault(a, []).append(f"`{b}`")
    reasons_text = []
    for (why, instead), pairs in reasons.items():
        who = "; ".join(f"`{a}` with {', '.join(others)}" for a, others in pairs.items())
        reasons_text.append(f"- {who}: because {why}. Instead: {instead}.")
    return [*lines, "", *reasons_text] if reasons_text else []


def references() -> str:
    """Return the page of all papers, by year."""
    entry = re.compile(
        r"@\w+\{(\w+), author = \{(.*?)\}, title = \{(.*)\}, year = \{(\d+)\}, url = \{(.*?)\}\}"
    )
    papers = sorted(entry.findall(BIB.read_text()), key=lambda one: (one[3], one[0]))
    lines = ["# Papers", ""]
    for key, author, title, year, url in papers:
        authors = author.replace(" and others", " et al.").replace(" and ", "; ")
        clean = title.replace("{", "").replace("}", "")
        lines.append(f"- {year}: {authors}, [{clean}]({url}) `{key}`")
    return "\n".join(lines) + "\n"
