"""The laws of the other five axes find members that break them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.axes.collectives import Collective, Copy
from shoal.axes.coordination import Coordination, all_reduce, parameter_server
from shoal.axes.partition import Partition, shard
from shoal.axes.scheduling import Event, Schedule, Slice, Task, fifo, priority, wfbp
from shoal.axes.synchrony import Synchrony
from shoal.testing.contracts import check

W = Callable[[int, int], Tensor]


def coordination(mixing: W, via: Any = "peers", servers: int = 0) -> Coordination:
    return Coordination("broken", via, "parameter", mixing, servers)


def directed(n: int, round: int) -> Tensor:
    eye = torch.eye(n, dtype=torch.float64)
    return (eye + eye.roll(1, 0)) / 2


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (coordination(lambda n, r: torch.eye(n, dtype=torch.float64)), "never receive"),
        (coordination(lambda n, r: torch.ones(n, n, dtype=torch.float64)), "sum to one"),
        (coordination(lambda n, r: torch.eye(n, dtype=torch.float64)[:, [0] * n]), "columns|rows"),
        (coordination(directed), "not symmetric"),
        (dataclasses.replace(all_reduce(), servers=1), "1 servers"),
        (dataclasses.replace(parameter_server(), servers=0), "0 servers"),
    ],
)
def test_the_laws_find_a_broken_coordination(broken: Coordination, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check(broken)


@pytest.mark.parametrize(
    "broken", [Synchrony("s", 0), Synchrony("s", 1, -1.0), Synchrony("s", 1, float("nan"))]
)
def test_the_laws_find_a_broken_synchrony(broken: Synchrony) -> None:
    with pytest.raises(AssertionError):
        check(broken)


def one_task(*slices: Slice) -> Any:
    return lambda layers, cost: (Task(slices, "reduce", Event("backward"), Event("update")),)


def early(layers: Any, cost: Any) -> Any:
    last = len(layers) - 1
    return tuple(task._replace(ready=Event("backward", last)) for task in wfbp().plan(layers, cost))


@pytest.mark.parametrize(
    ("plan", "facts", "told"),
    [
        (one_task(Slice(0, 0, 0)), {}, "no such layer"),
        (one_task(Slice(0, 0, 16)), {}, "no such layer"),
        (lambda layers, cost: (), {}, "without a task|ends at"),
        (lambda layers, cost: fifo().plan(layers, cost) * 2, {}, "at byte"),
        (early, {"overlaps": True}, "starts after backward"),
        (wfbp(1).plan, {}, "does not wait for all of backward"),
        (priority(4096).plan, {"overlaps": True, "early": True}, "cuts"),
        (priority(4096).plan, {"overlaps": True, "slices": True}, "is not early"),
    ],
)
def test_the_laws_find_a_broken_schedule(plan: Any, facts: dict[str, bool], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check(Schedule("broken", plan, **facts))


def test_the_laws_find_a_broken_collective() -> None:
    lazy = Collective("lazy", rounds=lambda world: (), chunks=lambda world: 1)
    with pytest.raises(ValueError, match="lacks the contribution"):
        check(lazy)
    own = Collective(
        "own order",  # each adds all parts up for itself, so that roundings differ
        rounds=lambda n: (
            tuple(Copy(s, t, 0, True) for t in range(n) for s in _from(t, n)) for _ in (1,)
        ),
        chunks=lambda world: 1,
    )
    with pytest.raises(AssertionError, match="bits differ"):
        check(own)


def _from(target: int, world: int) -> list[int]:
    return [(target + step) % world for step in range(1, world)]


def test_the_laws_find_a_broken_partition() -> None:
    class Wrong(Partition):
        @property
        def ranks(self) -> int:
            return self.shard + self.tensor

    with pytest.raises(AssertionError, match="ranks, not"):
        check(Wrong(shard=2, tensor=3))
    check(shard(2))
