"""Every route, run between real processes: the sum, the same bits everywhere, at every size."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.axes.collectives import MEMBERS, Collective, Network, native
from shoal.axes.collectives.kit.choose import WINNER
from shoal.runtime.context import ReplicaIndex
from shoal.runtime.wires import RouteTuner, routed
from shoal.testing.contracts import make, samples
from shoal.testing.processes import run_workers
from shoal.wire.probe import SIZES as PROBED
from shoal.wire.probe import Curve, probe, race, rising
from shoal.wire.route import rank_rounds, run_rounds

SIZES = (0, 1, 2, 3, 5, 7, 64, 1001)
TEXTS = (
    *(text for member in MEMBERS for text in samples(member)),
    "double_tree(1)",
    "hierarchical(2, butterfly)",
    "hierarchical(3, double_tree)",
)
ROUTES = tuple(text for text in TEXTS if make(text).rounds is not None)


def _values(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randn(size, dtype=torch.float64, generator=generator)


def _sums() -> dict[str, list[tuple[list[float], list[float]]]]:
    """(by the route, by torch) for each route and size, with no barrier between."""
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for text in ROUTES:
        route: Collective = make(text)
        if route.rounds is None or route.refusal(world):
            continue
        ours = [_values(rank, size) for size in SIZES]
        theirs = [values.clone() for values in ours]
        for values in ours:
            own_rounds = rank_rounds(route.rounds(world), dist.get_rank())
            run_rounds(values, own_rounds, chunks=route.chunks(world))
        for values in theirs:
            dist.all_reduce(values)
        found[text] = [(a.tolist(), b.tolist()) for a, b in zip(ours, theirs, strict=True)]
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_route_sums_like_torch_at_every_size_and_alike_on_every_rank(world: int) -> None:
    results = run_workers(world, _sums, seconds=120)
    served = [text for text in ROUTES if not make(text).refusal(world)]
    assert list(results[0]) == served
    for text in served:
        for size_results in zip(*(result[text] for result in results), strict=True):
            for ours, theirs in size_results:
                torch.testing.assert_close(
                    torch.tensor(ours), torch.tensor(theirs), rtol=1e-12, atol=1e-12
                )
                assert ours == size_results[0][0], f"{text}: ranks hold different bits"


def _chosen() -> tuple[dict[int, str], list[list[float]]]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    route = routed(make("fastest"), ReplicaIndex(rank, world), None)
    assert isinstance(route, RouteTuner)
    sums = []
    for size in (3, 1001, 40_000, 3, 200_000):
        values = _values(rank, size)
        route(values)
        sums.append(values[:5].tolist())
    return {nbytes: repr(chosen) for nbytes, chosen in route.chosen.items()}, sums


@pytest.mark.gloo
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_all_ranks_choose_the_same_route_for_each_size(world: int) -> None:
    results = run_workers(world, _chosen, seconds=120)
    choices, sums = results[0]
    assert list(choices) == [24, 8008, 320_000, 1_600_000]  # one a size, not one a message
    assert all(result == results[0] for result in results)
    for size, found in zip((3, 1001, 40_000, 3, 200_000), sums, strict=True):
        total = torch.stack([_values(rank, size) for rank in range(world)]).sum(0)[:5]
        torch.testing.assert_close(torch.tensor(found), total, check_dtype=False)


def _told(reports: list[str]) -> tuple[list[str], list[float]]:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    route = routed(make(f"fastest({reports[rank]!r})"), ReplicaIndex(rank, world), None)
    assert isinstance(route, RouteTuner)
    values = _values(rank, 1001)
    route(values)
    return [repr(chosen) for chosen in route.chosen.values()], values[:5].tolist()


def _report(path: Path, route: str) -> str:
    row = {"case": f"4KB, 3 ranks: {route}", "metric": WINNER}
    path.write_text(json.dumps({"results": [row]}))
    return str(path)


@pytest.mark.gloo
def test_a_report_of_the_bench_tells_which_route_to_run(tmp_path: Path) -> None:
    report = _report(tmp_path / "routes.json", "double_tree")
    total = torch.stack([_values(rank, 1001) for rank in range(3)]).sum(0)[:5]
    for chosen, found in run_workers(3, _told, [report] * 3, seconds=120):
        assert chosen == ["double_tree"]
        torch.testing.assert_close(torch.tensor(found), total, check_dtype=False)


@pytest.mark.gloo
def test_hosts_with_different_reports_are_told_so_and_do_not_hang(tmp_path: Path) -> None:
    one = _report(tmp_path / "one.json", "ring")
    other = _report(tmp_path / "other.json", "tree")
    with pytest.raises(Exception, match="give all hosts the same report"):
        run_workers(3, _told, [one, one, other], seconds=120)


def _probed() -> list[Any]:
    dist.init_process_group("gloo")
    curves = probe(None, torch.device("cpu"), sizes=(1024, 65536))
    return [curve.points for curve in curves]


@pytest.mark.gloo
def test_what_is_measured_is_agreed() -> None:
    one, *others = run_workers(3, _probed, seconds=120)
    assert all(other == one for other in others)
    for points in one:
        assert [nbytes for nbytes, _ in points] == [1024, 65536]
        assert 0 < points[0][1] <= points[1][1]


def _raced() -> tuple[list[float], list[int]]:
    """The second of three calls sleeps on one rank only, and much longer than the others take."""
    dist.init_process_group("gloo")
    ran = [0, 0, 0]

    def call(index: int, seconds: float) -> None:
        ran[index] += 1
        time.sleep(seconds)

    late = 0.04 if dist.get_rank() == 1 else 0.0
    calls = [partial(call, 0, 0.004), partial(call, 1, late), partial(call, 2, 0.004)]
    return race(calls, None, torch.device("cpu")), ran


@pytest.mark.gloo
def test_in_a_race_the_slowest_rank_counts_all_drop_the_same_and_hold_the_same_times() -> None:
    results = run_workers(2, _raced, seconds=120)
    assert results[0] == results[1]
    times, ran = results[0]
    assert times[1] == math.inf
    assert ran[1] < ran[0] == ran[2]
    assert all(0.004 <= taken < math.inf for taken in (times[0], times[2]))


def test_a_curve_is_straight_between_points_and_goes_on_at_the_mean_slope() -> None:
    curve = Curve(((10, 1.0), (20, 2.0), (40, 2.5)))
    assert curve.cost(0) == curve.cost(10) == 1.0
    assert curve.cost(15) == 1.5
    assert curve.cost(30) == 2.25
    assert curve.cost(40) == 2.5
    assert curve.cost(100) == 2.5 + 60 * 1.5 / 30


def test_a_curve_never_falls() -> None:
    assert rising((1, 2, 3), [2.0, 1.0, 3.0]).points == ((1, 2.0), (2, 2.0), (3, 3.0))
    assert list(PROBED) == sorted(PROBED)


def _sizes_timed() -> list[int]:
    dist.init_process_group("gloo")
    asked: list[int] = []

    def contenders(nbytes: float, world: int, network: Network) -> tuple[Collective, ...]:
        asked.append(int(nbytes))
        return native(), make("tree")

    index = ReplicaIndex(dist.get_rank(), dist.get_world_size())
    choice = RouteTuner(replace(make("fastest"), contenders=contenders), index, None)
    for size in (1000, 1001, 1500, 300):
        choice(_values(index.worker, size))
    return asked


@pytest.mark.gloo
def test_messages_of_about_one_size_are_tried_once() -> None:
    first, *others = run_workers(2, _sizes_timed, seconds=120)
    assert first == [4096, 16384]  # 8,008 bytes are nearer to the one, 12,000 to the other
    assert others == [first]
