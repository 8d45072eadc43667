"""MG-WFBP's rule against its own text, against no merging, and against every way to merge."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.scheduling import Layer, merged
from shoal.axes.scheduling.kit.grouping import message
from shoal.axes.scheduling.merged import merge
from shoal.simulate.schedule import schedule_seconds

seconds = st.integers(0, 1024).map(lambda n: n / 2**20)
models = st.lists(
    st.builds(Layer, st.just("l"), st.sampled_from([4, 400, 40_000, 400_000]), seconds, seconds),
    min_size=1,
    max_size=7,
)
# Powers of two: sums are exact, so that no tie is decided by rounding.
alphas = st.sampled_from([2.0**-17, 2.0**-14, 2.0**-10])
betas = st.sampled_from([2.0**-33, 2.0**-30, 2.0**-27])
Groups = list[tuple[int, ...]]


def algorithm_1(layers: list[Layer], alpha: float, beta: float) -> Groups:
    """As the authors wrote it, start times worked out anew after each merge."""
    count = len(layers)
    p, tb = [layer.nbytes for layer in layers], [layer.backward for layer in layers]
    tc = [alpha + beta * n for n in p]
    tau_b = [sum(tb[i + 1 :]) for i in range(count)]

    def starts() -> list[float]:
        tau_c = [0.0] * count
        tau_c[-1] = tau_b[-1] + tb[-1]
        for i in reversed(range(count - 1)):
            tau_c[i] = max(tau_c[i + 1] + tc[i + 1], tau_b[i] + tb[i])
        return tau_c

    groups, group, tau_c = [], [count - 1], starts()
    for i in range(count - 1, 0, -1):
        r = tau_b[i - 1] + tb[i - 1]
        if r < tau_c[i] + tc[i] and (tau_c[i] > r or r - tau_c[i] < alpha):
            tc[i], p[i - 1] = 0.0, p[i - 1] + p[i]
            tc[i - 1] = alpha + beta * p[i - 1]
            tau_c = starts()
        else:
            groups.append(tuple(group))
            group = []
        group.append(i - 1)
    return [*groups, tuple(group)]


def every_way(count: int) -> Iterator[Groups]:
    for ends in product([False, True], repeat=count - 1):
        groups: list[list[int]] = [[]]
        for index, end in zip(reversed(range(count)), (*ends, False), strict=True):
            groups[-1].append(index)
            if end:
                groups.append([])
        yield [tuple(group) for group in groups]


def price(groups: Groups, layers: list[Layer], alpha: float, beta: float) -> float:
    tasks = [message(layers, group) for group in groups]
    return schedule_seconds(tasks, layers, lambda n: alpha + beta * n).seconds


@given(models, alphas, betas)
@settings(deadline=None, max_examples=100)
def test_it_merges_as_the_paper_does(layers: list[Layer], alpha: float, beta: float) -> None:
    found = list(merge(layers, lambda n: alpha + beta * n))
    wanted = algorithm_1(layers, alpha, beta)
    assert found == wanted


@given(models, alphas, betas)
@settings(deadline=None, max_examples=50)
def test_it_is_between_no_merging_and_the_best_there_is(
    layers: list[Layer], alpha: float, beta: float
) -> None:
    """The rule looks one layer ahead, so it may miss the best, but never does harm."""
    found = price(list(merge(layers, lambda n: alpha + beta * n)), layers, alpha, beta)
    best = min(price(groups, layers, alpha, beta) for groups in every_way(len(layers)))
    apart = price([(i,) for i in reversed(range(len(layers)))], layers, alpha, beta)
    assert best * (1 - 1e-9) <= found <= apart * (1 + 1e-9)


def test_it_is_the_best_there_is_where_a_startup_is_all_or_nothing() -> None:
    layers = [Layer(f"l{i}", 1000, 1e-3, 2e-3) for i in range(6)]
    for alpha, groups in ((1.0, [(5, 4, 3, 2, 1, 0)]), (1e-6, [(i,) for i in (5, 4, 3, 2, 1, 0)])):
        assert list(merge(layers, lambda n, a=alpha: a + n * 1e-9)) == groups
        best = min(price(g, layers, alpha, 1e-9) for g in every_way(6))
        assert price(groups, layers, alpha, 1e-9) == pytest.approx(best)


def test_while_the_link_is_busy_whatever_comes_is_merged() -> None:
    """Layer 2 keeps the link busy until 11 s; 1 and 0 come at 2 s and 3 s and go together."""
    layers = [Layer("a", 1, 0, 1), Layer("b", 1, 0, 1), Layer("c", 10, 0, 1)]
    plan = merged().plan(layers, lambda n: float(n))
    assert [[piece.layer for piece in task.slices] for task in plan] == [[2], [1, 0]]


def test_it_asks_to_be_told_times() -> None:
    assert merged().measures == "times"
    assert merged().overlaps
