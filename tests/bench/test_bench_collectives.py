"""The suite of collectives: what is compared with what, and that it runs (nothing is time_row)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import bench
from shoal.bench.collectives import mpi_peer
from shoal.bench.collectives import suite as collectives
from shoal.bench.collectives.calls import COLLECTIVES, IN_PLACE
from shoal.bench.collectives.suite import (
    MB,
    SIZES,
    CollectiveCase,
    bandwidth_row,
    copy_threshold,
    gloo_threshold,
    measure,
    mpi_threshold,
    parse_ranks,
    parse_sizes,
    plot_series,
    rows,
    size_text,
    time_row,
)
from shoal.bench.collectives.times import COPY, GLOO, MPI, SHOAL, TWIN, Times
from shoal.bench.report import Report
from shoal.bench.statistics import turns
from shoal.cli import main
from shoal.errors import BadArgument, FaultError

CASE = CollectiveCase("all_reduce", MB, 2)


def times(ours: float, gloo: float, copy: float, *, noise: float = 0.0) -> Times:
    """Equal blocks, but for the twin, which is off by ``noise`` to either side in turns of two."""
    twin = [ours * (1 + noise * (-1) ** (block // 2)) for block in range(40)]
    return {
        SHOAL: [ours] * 40,
        TWIN: twin,
        GLOO: [gloo] * 40,
        COPY: [copy] * 40,
        MPI: [2 * ours] * 40,
    }


@pytest.fixture
def fresh() -> Iterator[None]:
    """MPI is looked for once; here, and after, it is looked for again."""
    mpi_peer.find_mpi.cache_clear()
    yield
    mpi_peer.find_mpi.cache_clear()


def test_the_suite_is_listed() -> None:
    assert bench.find("collectives") is collectives.SUITE


def test_the_bars_are_those_of_the_issue() -> None:
    assert parse_sizes("4KB:64MB") == SIZES
    assert [size_text(n) for n in SIZES[::7]] == ["4 KB", "64 MB"]
    assert gloo_threshold(CollectiveCase("all_reduce", 64 << 10, 2)) == "<= 0.3333"
    assert gloo_threshold(CollectiveCase(IN_PLACE.name, 16 * MB, 4)) == "<= 0.2"
    assert gloo_threshold(CollectiveCase("broadcast", 16 * MB, 4)) == "<= 1"
    assert copy_threshold(CollectiveCase(IN_PLACE.name, 64 * MB, 2)) == "<= 2.5"
    assert copy_threshold(CollectiveCase(IN_PLACE.name, 64 * MB, 4)) == "<= 3.5"
    assert copy_threshold(CollectiveCase("all_reduce", 64 * MB, 2)) is None
    assert mpi_threshold(CASE) == mpi_threshold(CollectiveCase(IN_PLACE.name, 64 * MB, 4)) == "<= 1"
    assert mpi_threshold(CollectiveCase("all_reduce", 256 << 10, 2)) is None


def test_a_row_tells_time_bandwidth_and_verdict() -> None:
    measured = times(1e-3, 5e-3, 5e-4)
    row, wide = time_row(CASE, measured, GLOO, "gloo"), bandwidth_row(CASE, measured)
    assert (row.value, row.unit, row.against) == (1000, "us", "gloo")
    assert row.ratio == pytest.approx(0.2)
    assert row.passes
    assert wide.value == pytest.approx(MB / 1e-3 / 1e9)  # each rank sends half and takes half
    assert wide.ratio == pytest.approx(2)
    assert wide.passes is None
    assert not time_row(CASE, times(1.0, 2.0, 1.0), GLOO, "gloo").passes


def test_the_control_widens_a_bar_by_as_large_a_part_and_too_much_noise_allows_no_verdict() -> None:
    just_over = times(1.0, 1 / 0.34, 1.0, noise=0.025)  # threshold 0.3333, 2.5 % more is 0.3417
    assert time_row(CASE, just_over, GLOO, "gloo").passes
    far_over = times(1.0, 1 / 0.36, 1.0, noise=0.025)  # though 0.3333 + 0.025 is hardly less
    assert time_row(CASE, far_over, GLOO, "gloo").passes is False
    row = time_row(CASE, times(1.0, 100.0, 1.0, noise=0.04), GLOO, "gloo")
    assert row.passes, "noisy, but the whole interval is under the threshold"
    assert time_row(CASE, times(1.0, 2.0, 1.0, noise=0.04), GLOO, "gloo").passes is False
    shaken = times(1.0, 3.0, 1.0, noise=0.04)
    shaken[GLOO] = [seconds * (0.9 + 0.2 * (i // 2 % 2)) for i, seconds in enumerate(shaken[GLOO])]
    assert time_row(CASE, shaken, GLOO, "gloo").inconclusive


def test_every_peer_has_its_table_and_mpi_only_where_it_was_measured() -> None:
    full = times(1e-3, 5e-3, 5e-4)
    told = [row.against for row in rows([(CASE, full)], "Open MPI 4.1")]
    assert told == ["gloo", "Open MPI 4.1", "a copy", "itself"]
    without = {who: taken for who, taken in full.items() if who != MPI}
    assert [row.against for row in rows([(CASE, without)], "")] == ["gloo", "a copy", "itself"]


@pytest.mark.parametrize("count", [3, 4, 5])
def test_whoever_comes_before_another_comes_after_it_in_the_next_block(count: int) -> None:
    for block in range(0, 4 * count, 2):
        assert turns(block, count) == turns(block + 1, count)[::-1]
        assert sorted(turns(block, count)) == list(range(count))
    firsts = {turns(block, count)[0] for block in range(0, 2 * count, 2)}
    assert len(firsts) == count


@pytest.mark.parametrize("text", ["", "4", "1MB:4KB", "4KB:1MB:2MB", "big", "1B"])
def test_sizes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="--sizes"):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["", "two", "1", "2,,4", "2,2", "-2", "65", "2;4", "²"])
def test_ranks_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="--ranks"):
        parse_ranks(text)


@pytest.mark.parametrize(
    "words",
    [
        ("collectives", "--ranks", "1"),
        ("collectives", "--sizes", "big"),
        ("collectives", "--sizes", "900GB"),
        ("overhead", "--ranks", "2"),
        ("overhead", "--sizes", "4KB"),
    ],
)
def test_a_bad_flag_is_one_message_and_exit_code_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    told = capsys.readouterr().err
    assert words[1] in told
    assert len(told.splitlines()) == 1


def test_what_is_chosen_is_measured_and_drawn_and_no_ddp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, int]] = []

    def pretend(ranks: int, nbytes: int, blocks: int, *, mpi: bool) -> dict[str, Times]:
        asked.append((ranks, nbytes))
        return {"all_reduce": times(1e-3, 5e-3, 5e-4)}

    monkeypatch.setattr(collectives, "measure", pretend)
    monkeypatch.setattr(mpi_peer, "find_mpi", lambda: mpi_peer.MpiInstallation(name="Open MPI 4.1"))
    kept = tmp_path / "found.json"
    words = ("--ranks", "3", "--sizes", "4KB:16KB", "--json", str(kept))
    assert main(["bench", "collectives", *words]) == 0
    assert asked == [(3, 4096), (3, 16384)]
    report = Report.from_json(kept.read_text())
    assert {row.metric for row in report.results} == {
        "all_reduce: time",
        "all_reduce: bus bandwidth",
    }
    (plot,) = (tmp_path / "found-plots").iterdir()
    assert plot.name == "all_reduce-3-ranks.svg"
    for label in ("shoal", "gloo", "Open MPI 4.1", "a copy"):
        assert f">{label}<" in plot.read_text()
    (series,) = plot_series(report).values()
    assert {name: points[1] for name, points in series.items()} == {
        "shoal": (16384, pytest.approx(1000)),
        "gloo": (16384, pytest.approx(5000)),
        "Open MPI 4.1": (16384, pytest.approx(2000)),
        "a copy": (16384, pytest.approx(500)),
    }


@pytest.mark.usefixtures("fresh")
def test_without_mpi_the_suite_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_peer, "find_spec", lambda name: None)
    assert "pip install mpi4py" in mpi_peer.find_mpi().why_not
    mpi_peer.find_mpi.cache_clear()
    monkeypatch.setattr(mpi_peer, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "openmpi-bin" in mpi_peer.find_mpi().why_not


@pytest.mark.gloo
def test_every_collective_is_measured() -> None:
    found = measure(2, 4096, 2)
    assert list(found) == [c.name for c in COLLECTIVES]
    for taken in found.values():
        assert {who: len(seconds) for who, seconds in taken.items()} == dict.fromkeys(
            (SHOAL, TWIN, GLOO, COPY), 2
        )


@pytest.mark.gloo
def test_mpi_takes_its_turns_in_the_same_processes() -> None:
    if why := mpi_peer.find_mpi().why_not:
        pytest.skip(why)
    found = measure(2, 4096, 2, mpi=True)
    assert list(found) == [c.name for c in COLLECTIVES]
    assert all(len(taken[MPI]) == 2 for taken in found.values())
    with pytest.raises(FaultError, match=r"mpirun -n 1 ended with exit code 1: .*no such size"):
        mpi_peer._mpirun(1, "raise SystemExit('no such size')", seconds=60)
