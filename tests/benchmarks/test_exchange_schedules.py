"""Schedules in the suite ``exchange``: who is judged against whom, and a cut of the rate."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import torch

from benchmarks.exchange import contenders, link_change, schedules, sockets, workloads
from benchmarks.exchange import suite as exchange
from benchmarks.exchange.contenders import ADAPTIVE, DDP, NULL
from benchmarks.exchange.jobs import Loopback
from benchmarks.exchange.results import Results, TrainingRun
from benchmarks.exchange.schedules import ALONE, TWIN
from benchmarks.exchange.workloads import WORKLOADS
from shoal.bench.suites import BenchSettings
from shoal.errors import BadArgument

WFBP, MERGED, PRIORITY = contenders.SCHEDULES[:3]
USUAL = {NULL: 0.5, ALONE: 0.5, DDP: 1.0, WFBP: 0.95, MERGED: 0.8, PRIORITY: 1.1, ADAPTIVE: 0.81}


def found(noise: float = 0.0, **usual: float) -> dict[str, dict[str, list[float]]]:
    """Blocks that all take the same time; the twin strays by ``noise``."""
    names = {**USUAL, **{getattr(schedules, n, n): s for n, s in usual.items()}}
    timed = {name: [names[name]] * 18 for name in (ADAPTIVE, MERGED, DDP)}
    stray = [names[MERGED] * (1 + (noise if i // 2 % 2 else -noise)) for i in range(18)]
    return {"tried": {n: [s] * 3 for n, s in names.items()}, "timed": {**timed, TWIN: stray}}


def thresholds(told: dict[str, dict[str, list[float]]]) -> list[tuple[str | None, bool | None]]:
    return [(row.threshold, row.passes) for row in schedules.judge("mlp", told) if row.threshold]


def test_adaptive_is_held_against_the_best_fixed_one_and_plans_against_ddp() -> None:
    rows = {row.threshold: row for row in schedules.judge("mlp", found()) if row.threshold}
    assert rows[schedules.FASTER].against == DDP
    assert rows[schedules.FASTER].ratio == pytest.approx(0.8)
    assert (rows[schedules.CLOSE].against, rows[schedules.CLOSE].passes) == (MERGED, True)
    assert all(row.interval is not None for row in rows.values())


def test_of_those_that_plan_the_better_one_is_held_against_ddp_in_blocks_that_did_not_choose() -> (
    None
):
    told = found()
    told["timed"][ADAPTIVE] = [0.6] * 6 + [0.7] * 12
    (row,) = [row for row in schedules.judge("mlp", told) if row.threshold == schedules.FASTER]
    assert row.case.endswith(ADAPTIVE)
    assert row.ratio == pytest.approx(0.7)
    told["timed"][ADAPTIVE] = [0.9] * 6 + [0.1] * 12
    (row,) = [row for row in schedules.judge("mlp", told) if row.threshold == schedules.FASTER]
    assert row.case.endswith(MERGED)


def test_a_comparison_without_adaptive_or_without_another_that_plans_is_refused_at_once() -> None:
    for names in ((MERGED, WFBP), (WFBP, ADAPTIVE)):
        with pytest.raises(BadArgument, match="merged or priority"):
            schedules.ScheduleComparison("tiny", names)


def test_a_fixed_one_that_plans_is_timed_even_if_another_was_better() -> None:
    assert schedules.choose(found()["tried"]) == (MERGED, [ADAPTIVE, MERGED])
    simple = {**found()["tried"], WFBP: [0.5] * 3}
    assert schedules.choose(simple) == (WFBP, [ADAPTIVE, MERGED])


def test_the_twin_of_the_best_fixed_one_widens_the_bar_and_too_much_noise_is_no_verdict() -> None:
    close = found()
    close["timed"][ADAPTIVE] = [0.83] * 18
    assert thresholds(close)[1] == (schedules.CLOSE, False)
    noisy = found(noise=0.02)
    noisy["timed"][ADAPTIVE] = [0.83] * 18
    assert thresholds(noisy)[1] == (schedules.CLOSE, True)


def test_where_the_twin_is_too_noisy_only_a_whole_interval_beside_the_bar_tells() -> None:
    assert thresholds(found(noise=0.05))[1] == (schedules.CLOSE, True)
    wide = found(noise=0.05)
    wide["timed"][ADAPTIVE] = [0.8 if i // 2 % 2 else 0.84 for i in range(18)]
    assert thresholds(wide)[1] == (schedules.CLOSE, None)


def test_where_there_is_little_to_overlap_it_is_said_and_not_judged() -> None:
    told = found()
    told["tried"][NULL] = [0.01] * 3
    assert [threshold for threshold, _ in thresholds(told)] == [schedules.CLOSE]
    assert any("not judged" in row.metric for row in schedules.judge("mlp", told))


def test_schedules_are_compared_on_models_of_both_kinds() -> None:
    names = exchange.SCHEDULE_WORKLOADS
    assert {name.partition(",")[0].rpartition(" ")[2] for name in names} == set(exchange.MODELS)
    assert set(names) <= set(WORKLOADS)


def test_a_layer_that_computes_elsewhere_sleeps_its_share_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(workloads.time, "sleep", slept.append)
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    x = torch.randn(3, 4)
    plain(x).sum().backward()
    grads = [p.grad for p in plain.parameters()]
    plain.zero_grad()
    workloads.with_sleep(plain, 0.6)(x).sum().backward()
    for p, grad in zip(plain.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad)
    shares = [0.6 * 24 / 36, 0.6 * 12 / 36]
    expected = [s / 3 for s in shares] + [2 * s / 3 for s in reversed(shares)]
    assert slept == pytest.approx(expected)


KEPT = [20, "kept of merged 5 ms", "merged (2 tensors fused)"]


def test_steps_count_from_the_cut_to_the_first_decision_made_for_it() -> None:
    heard = [[5, "measured; a message takes 1 ms", "merged"], KEPT, [36, "tried too", "wfbp"]]
    anew = [43, "messages take 9.8x; a message takes 1 ms and 0.1 Gbit/s", "wfbp (all alone)"]
    before, after = link_change.judge(
        "mlp", {"decisions": [*heard, anew, [48, "tried too", "x"]], "changed": 31}
    )
    assert before.value == 20
    assert (after.value, after.passes) == (12, True)
    assert "wfbp (all alone); messages take 9.8x" in after.case


def test_who_decides_late_or_never_fails() -> None:
    late = [60, "messages take 9x", "wfbp"]
    assert [
        row.passes for row in link_change.judge("x", {"decisions": [KEPT, late], "changed": 31})
    ][-1] is False
    assert [row.passes for row in link_change.judge("x", {"decisions": [KEPT], "changed": 31})][
        -1
    ] is False


def test_decisions_are_heard_with_their_step() -> None:
    heard, logger = link_change.DecisionLog(), logging.Logger("shoal")
    logger.addHandler(heard)
    heard.step = 7
    logger.info("%s: %s (%s): %s", "adaptive", "merged", "1 alone", "tried too")
    logger.info("something else")
    assert heard.decisions == [(7, "tried too", "merged (1 alone)")]


def test_sockets_count_what_was_written_and_nothing_else() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            before = sockets.counts()
            one.sendall(bytes(5000))
            assert other.recv(5000, socket.MSG_WAITALL) == bytes(5000)
            assert sockets.since(before) == 5000
            other.sendall(bytes(70))
            assert one.recv(70, socket.MSG_WAITALL) == bytes(70)
            assert sockets.since(before) == 5070


def test_the_store_is_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        before = sockets.counts()
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            one.sendall(bytes(5000))
            assert other.recv(5000, socket.MSG_WAITALL) == bytes(5000)
            assert sockets.since(before) == 0


class Noted(Loopback):
    """Loopback that remembers which rates were asked for."""

    def __init__(self, hosts: int) -> None:
        super().__init__(hosts)
        self.rates: list[str] = []

    def limit(self, rate: str) -> None:
        """Note it."""
        self.rates.append(rate)


@pytest.mark.gloo
def test_schedules_take_turns_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (MERGED, WFBP, ADAPTIVE)
    wanted = schedules.ScheduleComparison("tiny", names, tries=1, blocks=18, steps=1, warm_up=1)
    monkeypatch.setattr(schedules, "ScheduleComparison", lambda *_, **__: wanted)
    rows = list(exchange.schedule_times(Loopback(2), "tiny", BenchSettings()))
    assert [row.against for row in rows[1:4]] == [DDP] * 3
    assert rows[-1].case == f"tiny, 1gbit: {ADAPTIVE}"


@pytest.mark.slow
@pytest.mark.gloo
def test_the_rate_is_cut_in_mid_run_when_a_worker_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = link_change.LinkChange("100mbit", "tiny", before=25, after=3)
    monkeypatch.setattr(link_change, "LinkChange", lambda *_, **__: wanted)
    place = Noted(2)
    before, after = exchange.replanning(place, BenchSettings())
    assert place.rates == ["1gbit", "100mbit"]
    assert before.metric == "decided in step"
    assert 4 <= before.value < 25
    assert (after.value, after.passes) == (1e4, False)  # memory is as fast as before


@pytest.mark.slow
@pytest.mark.gloo
def test_contenders_get_ready_before_the_links_are_slowed_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(exchange.STEPS, "tiny", 8)
    monkeypatch.setattr(contenders, "SLOW_STRATEGIES", (WFBP,))
    place, told = Noted(2), TrainingRun(DDP, ((0, 0.0, 9.0), (8, 1.0, 2.2)), 2.2, reached=True)
    rows = list(
        exchange.slow(place, "tiny", BenchSettings(), {"tiny": [Results({DDP: told}, 0.1, 8)]})
    )
    assert place.rates == ["1gbit", "100mbit", "1gbit", "100mbit", "1gbit"]
    assert rows[-1].case == f"tiny, 100mbit: best, {WFBP}"


@pytest.mark.gloo
def test_bytes_of_techniques_are_counted_at_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "COUNTED", ("all_reduce, bsp, wfbp, natural",))
    monkeypatch.setattr(exchange, "HOSTS", 2)
    told, _, off = exchange.bytes_sent(Loopback(2), BenchSettings())
    assert told.ratio == pytest.approx(1, abs=0.02)
    assert off.passes
