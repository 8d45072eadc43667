"""Fitted links: exact on lines, steady under outliers, and as good as reported on public logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.analysis.links import Link, Piece, Point, fit, mape, measure
from shoal.errors import BadArgument

SIZES = [2**k for k in range(2, 24)]
LOGS = Path(__file__).parents[3] / "shared" / "data" / "hkbu_bcaffe"


def on(link: Link, sizes: list[int] = SIZES) -> list[Point]:
    return [(n, link.cost(n)) for n in sizes]


@given(alpha=st.floats(1e-7, 1e-2), beta=st.floats(1e-12, 1e-6))
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    found = fit(on(Link(alpha, beta)))
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.beta == pytest.approx(beta, rel=1e-6)


def test_a_knee_is_found_again() -> None:
    link = Link(5e-5, 1e-9, (Piece(2**13, 2e-4, 2e-9),))
    found = fit(on(link), pieces=2)
    assert found.knees[0].start == 2**13
    assert mape(found, on(link)) < 1e-6


def test_a_line_has_no_knee() -> None:
    assert fit([(n, 1e-5) for n in SIZES], pieces=2).knees == ()


def test_no_message_becomes_cheaper_by_growing() -> None:
    drop = on(Link(1e-3, 1e-9), SIZES[:11]) + on(Link(1e-5, 1e-9), SIZES[11:])
    found = fit(drop, pieces=2)
    costs = [found.cost(n) for n in SIZES]
    assert costs == sorted(costs)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-7, 10)), min_size=6, max_size=30))
def test_costs_are_never_negative(points: list[tuple[int, float]]) -> None:
    if len({n for n, _ in points}) > 1:
        found = fit(points, pieces=2)
        assert min(found.alpha, found.beta) >= 0
        assert all(knee.alpha >= 0 and knee.beta >= 0 for knee in found.knees)


def test_falling_times_give_a_flat_line_and_not_a_negative_byte() -> None:
    assert fit([(1, 3.0), (2, 2.0), (3, 1.0)]).beta == 0


def test_a_negative_intercept_becomes_a_line_through_the_origin() -> None:
    found = fit([(1, 1.0), (10, 20.0), (100, 300.0)], robust=False)
    assert found.alpha == 0
    assert 1 < found.beta < 3


def test_a_hiccup_does_not_move_a_robust_fit() -> None:
    link = Link(5e-5, 1e-9)
    jitter = [(n, s * (1 + 0.01 * (-1) ** i)) for i, (n, s) in enumerate(on(link))]
    spoilt = [(n, s * (5 if i % 9 == 4 else 1)) for i, (n, s) in enumerate(jitter)]
    robust, plain = fit(spoilt), fit(spoilt, robust=False)
    assert robust.alpha == pytest.approx(link.alpha, rel=0.05)
    assert robust.beta == pytest.approx(link.beta, rel=0.05)
    assert mape(robust, on(link)) < mape(plain, on(link)) / 3


def test_small_messages_count_as_much_as_large_ones() -> None:
    crooked = on(Link(5e-5, 1e-9, (Piece(2**20, 0, 1.3e-9),)))
    assert fit(crooked).cost(4) == pytest.approx(5e-5, rel=0.05)


@pytest.mark.parametrize(
    ("points", "pieces"),
    [
        ([], 1),
        ([(8, 1.0), (8, 1.1)], 1),
        ([(8, 1.0), (16, 0.0)], 1),
        ([(8, 1.0), (16, float("nan"))], 1),
        ([(-8, 1.0), (16, 1.0)], 1),
        ([(8, 1.0), (16, 1.0)], 3),
    ],
)
def test_points_that_no_line_explains_are_refused(points: list[Point], pieces: int) -> None:
    with pytest.raises(BadArgument, match="fit"):
        fit(points, pieces=pieces)


def test_measuring_on_a_virtual_clock_gives_the_link_back() -> None:
    link, now = Link(1e-4, 1e-9), [0.0]

    def exchange(nbytes: int) -> None:
        now[0] += link.cost(nbytes)

    points = measure(exchange, SIZES, clock=lambda: now[0], repeats=3)
    assert [n for n, _ in points] == SIZES
    assert mape(fit(points), on(link)) < 1e-3
    with pytest.raises(BadArgument, match="repeats=0"):
        measure(exchange, SIZES, repeats=0)


def osu_log(nodes: int) -> list[Point]:
    """(nbytes, seconds) of the OSU all-reduce log of that many nodes."""
    path = LOGS / f"allreduce{nodes}.log"
    if not path.exists():
        pytest.skip(f"the public logs are not here ({path})")
    rows = [line.replace(",", " ").split() for line in path.read_text().splitlines()]
    return [(int(r[-2]), float(r[-1]) * 1e-6) for r in rows if r and r[-1][0].isdigit()]


@pytest.mark.parametrize(("nodes", "percent"), [(2, 7.8), (4, 11.5), (8, 20.1)])
def test_one_line_is_as_far_off_on_public_logs_as_reported(nodes: int, percent: float) -> None:
    points = osu_log(nodes)
    assert len(points) == 266
    assert mape(fit(points, robust=False), points) == pytest.approx(percent, abs=0.05)
    assert mape(fit(points), points) <= percent


@pytest.mark.parametrize(("nodes", "percent"), [(2, 3.0), (4, 5.6), (8, 7.1)])
def test_the_line_above_the_protocol_switch_is_as_good_as_reported(
    nodes: int, percent: float
) -> None:
    large = [point for point in osu_log(nodes) if point[0] > 8192]
    assert mape(fit(large, robust=False), large) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_two_lines_halve_the_error_on_public_logs(nodes: int) -> None:
    points = osu_log(nodes)
    assert mape(fit(points, pieces=2), points) < mape(fit(points), points) / 2
