"""The resume law: killed and resumed is as good as never killed, to the bit, for every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_cases import Case, assert_same, interrupted, uninterrupted

pytestmark = pytest.mark.gloo

TOGETHER = [
    Case("auto"),
    Case("auto", normalises=True),
    Case("fifo, error_feedback(topk(0.2))", "momentum"),
    Case("wfbp(1), error_feedback(powersgd(2))"),
    Case("local(4)", normalises=True),  # saved after step 3: amid a period
    Case("local(2), error_feedback(topk(0.2))"),
    Case("bmuf(0.5), local(2), error_feedback(topk(0.2))"),
    Case("gossip(ring)"),
    Case("priority(64)"),
    Case("priority(64), error_feedback(topk(0.2))", "momentum"),
]


def named(case: Case) -> str:
    return f"{case.strategy} {case.optimizer}{' batchnorm' if case.normalises else ''}"


@pytest.mark.parametrize("case", TOGETHER, ids=named)
def test_killed_and_resumed_ends_as_if_never_killed(case: Case, tmp_path: Path) -> None:
    whole = uninterrupted(2, case, tmp_path)
    resumed = interrupted(2, case, tmp_path, after=5)
    assert min(resumed[0].ids) == 3, "exactly the steps since the last save are redone"
    assert_same(whole, resumed)


SERVED = [
    Case("parameter_server, bsp, fifo", "momentum"),
    Case("parameter_server, ssp(2), fifo", "momentum", takes_turns=True),
    Case("parameter_server(2), asp, fifo", "adam", takes_turns=True),
    Case("parameter_server, asp, fifo, error_feedback(topk(0.2))", "adam", takes_turns=True),
]


@pytest.mark.parametrize("case", SERVED, ids=named)
def test_the_servers_model_and_optimizer_go_on(case: Case, tmp_path: Path) -> None:
    servers = 2 if "(2)" in case.strategy.split(",")[0] else 1
    whole = uninterrupted(2, case, tmp_path, servers=servers)
    resumed = interrupted(2, case, tmp_path, after=5, servers=servers)
    assert min(resumed[0].ids) == 3
    assert_same(whole, resumed)


def test_peers_that_never_wait_go_on_each_from_its_own_model(tmp_path: Path) -> None:
    case = Case("gossip(ring), asp, fifo", takes_turns=True)
    whole = uninterrupted(3, case, tmp_path)
    resumed = interrupted(3, case, tmp_path, after=5)
    first, second = (next(iter(w.parameters.values())) for w in whole[:2])
    assert not first.equal(second), "or the law would be empty"
    assert_same(whole, resumed)


CUT = [
    Case("shard(2)"),
    Case("tensor(2)", "momentum"),
    Case("pipe(2)"),
]
CUT_AND_COPIED = [
    Case("shard(2), error_feedback(topk(0.2)), fifo"),
    Case("pipe(2) * shard(2)"),
    Case("shard(2), local(4), fifo"),
]


@pytest.mark.parametrize("case", CUT, ids=named)
def test_a_model_that_is_cut_goes_on(case: Case, tmp_path: Path) -> None:
    whole = uninterrupted(2, case, tmp_path)
    resumed = interrupted(2, case, tmp_path, after=5)
    assert min(resumed[0].ids) == 3
    assert_same(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("case", CUT_AND_COPIED, ids=named)
def test_replicas_that_are_cut_go_on(case: Case, tmp_path: Path) -> None:
    whole = uninterrupted(4, case, tmp_path)
    assert_same(whole, interrupted(4, case, tmp_path, after=5))
