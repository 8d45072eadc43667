"""The routes suite: what is measured, who is said to win, what is drawn (nothing is timed here)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from shoal import bench
from shoal.bench import routes, suites
from shoal.bench.report import Report, Result
from shoal.bench.routes import (
    FASTEST,
    MANY,
    MANY_SIZES,
    NATIVE,
    RANKS,
    ROUTES,
    SIZES,
    THRESHOLD,
    TWIN,
    RouteTimes,
    draw,
    rows,
    time_blocks,
    timed,
    winner,
)
from shoal.bench.statistics import MIN_BLOCKS
from shoal.bench.suites import BenchSettings
from shoal.testing.contracts import make
from shoal.testing.processes import run_workers


def point(
    nbytes: int = 4096, ranks: int = 2, *, noise: float = 0.0, **seconds: float
) -> RouteTimes:
    """Torch's own takes one second, and its twin strays by ``noise``; others as given, or two."""
    served = [name for name in ROUTES if not make(name).refusal(ranks)]
    each = dict.fromkeys((*served, FASTEST), 2.0) | {NATIVE: 1.0} | seconds
    times = {name: [value] * MIN_BLOCKS for name, value in each.items()}
    pairs = [1 + (noise if i // 2 % 2 else -noise) for i in range(MIN_BLOCKS)]
    return RouteTimes(ranks, nbytes, {**times, TWIN: pairs}, chosen="ring")


def report(*points: RouteTimes) -> Report:
    return Report(suites.header("routes", (0,)), tuple(rows(points)))


def test_sizes_are_4_kb_to_16_mb_in_steps_of_four_on_2_and_4_ranks() -> None:
    assert (SIZES[0], SIZES[-1], RANKS) == (4 * 2**10, 16 * 2**20, (2, 4))
    assert all(after == 4 * before for before, after in pairwise(SIZES))


def test_the_suite_is_listed_and_draws() -> None:
    assert bench.find("routes") is routes.SUITE
    assert routes.SUITE.draw is draw


def test_every_route_serves_the_largest_number_of_ranks() -> None:
    assert not any(make(name).refusal(max(RANKS)) for name in ROUTES)
    assert all(make(name).rounds is not None for name in ROUTES)


def test_the_winner_is_named_in_its_case_with_its_gain() -> None:
    row = winner(point(tree=0.5))
    assert row.case == "4KB, 2 ranks: tree"
    assert row.value == pytest.approx(0.5e3)
    assert (row.against, row.ratio) == (NATIVE, pytest.approx(0.5))


def test_who_cannot_be_told_apart_from_the_winner_is_named_with_it() -> None:
    made = point(tree=0.5)
    wavering = [0.45 if i // 2 % 2 else 0.6 for i in range(MIN_BLOCKS)]
    row = winner(RouteTimes(2, 4096, {**made.times, "ring": wavering}, chosen="ring"))
    assert row.case == "4KB, 2 ranks: tree or ring"


def test_torchs_own_may_win_and_is_one_time_itself() -> None:
    row = winner(point())
    assert (row.case, row.ratio) == ("4KB, 2 ranks: native", pytest.approx(1.0))


def test_neither_the_twin_nor_the_chooser_is_a_route_that_wins() -> None:
    assert winner(point(fastest=0.1)).case.endswith(": native")


@pytest.mark.parametrize(
    ("seconds", "noise", "passes"),
    [(1.0, 0.0, True), (1.2, 0.0, False), (1.12, 0.025, True), (1.0, 0.1, True), (1.3, 0.1, False)],
)
def test_the_chooser_is_judged_by_its_bar_and_the_control(
    seconds: float, noise: float, passes: bool | None
) -> None:
    row = timed(point(noise=noise, fastest=seconds), FASTEST)
    assert (row.threshold, row.passes) == (THRESHOLD, passes)
    assert row.case == "4KB, 2 ranks: ring"


def test_where_control_and_chooser_are_both_noisy_there_is_no_verdict() -> None:
    made = point(noise=0.1)
    wavering = [1.0 if i // 2 % 2 else 1.2 for i in range(MIN_BLOCKS)]
    row = timed(RouteTimes(2, 4096, {**made.times, FASTEST: wavering}, chosen="ring"), FASTEST)
    assert row.passes is None


def test_only_the_chooser_has_a_bar() -> None:
    found = list(rows([point(), point(ranks=4)]))
    assert {row.metric for row in found if row.threshold} == {"fastest: time"}


def test_each_route_is_told_where_it_serves_and_the_control_last() -> None:
    found = list(rows([point(), point(ranks=4)]))
    told = [row.case for row in found if row.metric == "blueconnect(2, 2): time"]
    assert told == ["4KB, 4 ranks"]
    assert (found[-1].metric, found[-1].against) == ("native: time", TWIN)
    assert len(found) == len({(row.case, row.metric) for row in found})


def test_plots_show_every_route_over_size_and_over_ranks_and_who_wins(tmp_path: Path) -> None:
    points = [point(nbytes, ranks) for ranks in RANKS for nbytes in SIZES]
    points += [point(nbytes, MANY) for nbytes in MANY_SIZES]
    written = draw(report(*points), tmp_path / "new" / "plots")
    assert [path.name for path in written] == [
        *(f"routes-{ranks}-ranks.svg" for ranks in (*RANKS, MANY)),
        *(f"routes-{size}.svg" for size in ("4KB", "256KB", "4MB")),
        "routes-winners.svg",
    ]
    text = written[1].read_text(encoding="utf-8")
    assert all(f">{name}</text>" in text for name in (*ROUTES, FASTEST, NATIVE))
    assert "16777216, 2000" in text
    winners = written[-1].read_text(encoding="utf-8")
    assert winners.count(">native</text>") == len(points)
    assert ">16MB</text>" in winners


def test_a_report_read_back_gives_the_same_plots(tmp_path: Path) -> None:
    made = report(point(), point(16384))
    ones = draw(made, tmp_path / "a")
    others = draw(Report.from_json(made.to_json()), tmp_path / "b")
    assert [one.read_bytes() for one in ones] == [other.read_bytes() for other in others]


def test_quick_measures_fewer_sizes_with_as_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def measure(ranks: int, nbytes: int, blocks: int, *, calls: int) -> RouteTimes:
        asked.append((ranks, nbytes, blocks))
        return point(nbytes, ranks)

    monkeypatch.setattr(routes, "measure", measure)
    results: list[Result] = list(routes.run(BenchSettings(quick=True)))
    assert results
    assert {ranks for ranks, _, _ in asked} == set(RANKS)
    assert len(asked) == 3
    assert {blocks for _, _, blocks in asked} == {MIN_BLOCKS}
    asked.clear()
    list(routes.run(BenchSettings()))
    assert [(ranks, nbytes) for ranks, nbytes, _ in asked] == [
        *((ranks, nbytes) for ranks in RANKS for nbytes in SIZES),
        *((MANY, nbytes) for nbytes in MANY_SIZES),
    ]


@pytest.mark.gloo
def test_workers_time_every_route_and_choose_alike() -> None:
    workers = run_workers(2, time_blocks, 4096, 2, 1, seconds=120)
    (times, chosen), (_, other) = workers
    served = {name for name in ROUTES if not make(name).refusal(2)}
    assert set(times) == served | {NATIVE, TWIN, FASTEST}
    assert all(len(taken) == 2 and min(taken) > 0 for taken in times.values())
    assert chosen == other != ""
