"""A report of ``shoal bench routes`` tells ``fastest`` which route to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.axes.collectives import fastest
from shoal.axes.collectives.collective import UNKNOWN
from shoal.errors import BadArgument, UnknownName
from shoal.strategy import parse

KB, MB = 2**10, 2**20
CASES = {
    "4KB, 2 ranks": "butterfly or tree",
    "1MB, 2 ranks": "native",
    "4KB, 4 ranks": "tree",
    "16MB, 4 ranks": "hierarchical(2, butterfly) or ring or native",
}


def written(folder: Path, cases: dict[str, str] = CASES) -> str:
    """A report with these winners, and with other rows."""
    rows: list[dict[str, Any]] = [
        {"case": f"{case}: {names}", "metric": "which route wins"} for case, names in cases.items()
    ]
    rows.append({"case": "4KB, 2 ranks", "metric": "ring: time"})
    path = folder / "routes.json"
    path.write_text(json.dumps({"header": {}, "results": rows}))
    return str(path)


def chosen(report: str, nbytes: float, world: int) -> str:
    choose = fastest(report).choose
    assert choose is not None
    return repr(choose(nbytes, world, UNKNOWN))


@pytest.mark.parametrize(
    ("nbytes", "world", "route"),
    [
        (1, 1, "native"),
        (1, 2, "butterfly"),
        (60 * KB, 2, "butterfly"),
        (70 * KB, 2, "native"),
        (64 * MB, 2, "native"),
        (4 * KB, 4, "tree"),
        (4 * MB, 4, "hierarchical(2, butterfly)"),
    ],
)
def test_the_winner_at_the_nearest_size_is_taken(
    tmp_path: Path, nbytes: float, world: int, route: str
) -> None:
    assert chosen(written(tmp_path), nbytes, world) == route


def test_it_is_written_and_read_back_in_a_strategy(tmp_path: Path) -> None:
    strategy = parse(f"all_reduce, fastest({written(tmp_path)!r})")
    assert parse(str(strategy)) == strategy
    assert not strategy.collectives.is_native


def test_a_world_that_was_not_measured_is_refused_by_name(tmp_path: Path) -> None:
    refusal = fastest(written(tmp_path)).refusal
    assert not any(map(refusal, (1, 2, 4)))
    assert "was measured with 2, 4 ranks, not with 3" in refusal(3)
    with pytest.raises(BadArgument, match="not with 3"):
        chosen(written(tmp_path), 1, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "is not a report"),
        ('{"results": 3}', "is not a report"),
        ('{"results": []}', "names no fastest route"),
        ('{"results": [{"case": "big, 2 ranks: ring", "metric": "which route wins"}]}', "is not"),
    ],
)
def test_what_is_no_report_is_refused_with_the_command_that_makes_one(
    tmp_path: Path, text: str | None, why: str
) -> None:
    path = tmp_path / "some.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadArgument, match=why) as caught:
        fastest(str(path))
    assert "shoal bench routes --json" in str(caught.value)


def test_a_route_that_nobody_knows_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="teleport"):
        fastest(written(tmp_path, {"4KB, 2 ranks": "teleport"}))
