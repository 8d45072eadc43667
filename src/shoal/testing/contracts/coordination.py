"""Laws of every coordination, most of them about W, its mixing matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.coordination import Coordination, spectral_gap
from shoal.testing.contracts.require import close, require

WORKERS = (1, 2, 3, 4, 5, 8, 9)
ROUNDS = (0, 1, 2, 7)
EXACT = 1e-12


def rows_and_columns_of_w_sum_to_one(coordination: Coordination) -> None:
    """W is doubly stochastic. No entry is negative, and rows and columns sum to one."""
    for label, w in _matrices(coordination):
        n = len(w)
        right = w.shape == (n, n) and w.dtype == torch.float64
        require(right, f"{label}: W is not {n} x {n} float64")
        require(bool((w >= 0).all()), f"{label}: W has negative entries")
        ones = torch.ones(n, dtype=torch.float64)
        require(close(w.sum(1), ones, EXACT), f"{label}: rows of W do not sum to one")
        require(close(w.sum(0), ones, EXACT), f"{label}: columns of W do not sum to one")


def mixing_keeps_the_mean(coordination: Coordination) -> None:
    """The mean of all models does not change in a round."""
    chance = torch.Generator().manual_seed(0)
    for label, w in _matrices(coordination):
        x = torch.randn(len(w), 6, generator=chance, dtype=torch.float64)
        require(close((w @ x).mean(0), x.mean(0), EXACT), f"{label}: W changes the mean")


def rounds_bring_all_workers_together(coordination: Coordination) -> None:
    """The first n rounds together shrink the differences of n workers (spectral gap > 0)."""
    for n in WORKERS:
        w = torch.eye(n, dtype=torch.float64)
        for round in range(n):
            w = coordination.mixing(n, round) @ w
        label = f"{coordination}, {n} workers"
        require(spectral_gap(w) > 1e-9, f"{label}: some workers never receive from others")


def w_is_the_same_on_every_worker(coordination: Coordination) -> None:
    """W depends only on the number of workers and the round."""
    for label, w in _matrices(coordination):
        n, round = len(w), int(label.rpartition(" ")[2])
        again = coordination.mixing(n, round)
        require(torch.equal(w, again), f"{label}: two calls return different W")


def neighbours_are_mutual(coordination: Coordination) -> None:
    """Via peers, W is symmetric: if i receives from j, then j receives from i."""
    if coordination.via == "peers":
        for label, w in _matrices(coordination):
            require(close(w, w.T, EXACT), f"{label}: W is not symmetric")


def servers_are_there_when_a_server_carries(coordination: Coordination) -> None:
    """There are server processes if and only if messages go via servers."""
    via, servers = coordination.via, coordination.servers
    require((via == "server") == (servers > 0), f"{coordination}: via {via} with {servers} servers")


def _matrices(coordination: Coordination) -> list[tuple[str, Tensor]]:
    return [
        (f"{coordination}, {n} workers, round {r}", coordination.mixing(n, r))
        for n in WORKERS
        for r in ROUNDS
    ]


LAWS = (
    rows_and_columns_of_w_sum_to_one,
    mixing_keeps_the_mean,
    rounds_bring_all_workers_together,
    w_is_the_same_on_every_worker,
    neighbours_are_mutual,
    servers_are_there_when_a_server_carries,
)
