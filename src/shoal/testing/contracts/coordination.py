"""Laws of every coordination: what W must be for the workers' mean to stay what it is."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.coordination import Coordination, spectral_gap
from shoal.testing.contracts.require import close, require

WORKERS = (1, 2, 3, 4, 5, 8, 9)
ROUNDS = (0, 1, 2, 7)
EXACT = 1e-12


def rows_and_columns_of_w_sum_to_one(coordination: Coordination) -> None:
    """W is doubly stochastic: nobody's voice is lost, none counts twice."""
    for told, w in _matrices(coordination):
        n = len(w)
        require(
            w.shape == (n, n) and w.dtype == torch.float64, f"{told}: W is not {n} x {n} float64"
        )
        require(bool((w >= 0).all()), f"{told}: W has negative entries")
        ones = torch.ones(n, dtype=torch.float64)
        require(close(w.sum(1), ones, EXACT), f"{told}: rows of W do not sum to one")
        require(close(w.sum(0), ones, EXACT), f"{told}: columns of W do not sum to one")


def mixing_keeps_the_mean(coordination: Coordination) -> None:
    """The mean of all models is the same before and after a round."""
    chance = torch.Generator().manual_seed(0)
    for told, w in _matrices(coordination):
        x = torch.randn(len(w), 6, generator=chance, dtype=torch.float64)
        require(close((w @ x).mean(0), x.mean(0), EXACT), f"{told}: W moves the mean")


def rounds_bring_all_workers_together(coordination: Coordination) -> None:
    """As many rounds as there are workers connect all of them: disagreement fades."""
    for n in WORKERS:
        w = torch.eye(n, dtype=torch.float64)
        for round in range(n):
            w = coordination.mixing(n, round) @ w
        require(spectral_gap(w) > 1e-9, f"{coordination}, {n} workers: some never hear of others")


def w_is_the_same_on_every_worker(coordination: Coordination) -> None:
    """W is a function of workers and round, and of nothing else."""
    for told, w in _matrices(coordination):
        n, round = len(w), int(told.rpartition(" ")[2])
        require(
            torch.equal(w, coordination.mixing(n, round)), f"{told}: W differs when asked twice"
        )


def neighbours_are_mutual(coordination: Coordination) -> None:
    """Among peers, whoever I may ask may ask me: W is symmetric."""
    if coordination.via == "peers":
        for told, w in _matrices(coordination):
            require(close(w, w.T, EXACT), f"{told}: W is not symmetric")


def servers_are_there_when_a_server_carries(coordination: Coordination) -> None:
    """Extra processes are started for a server, and for nothing else."""
    serves = coordination.via == "server"
    require(serves == (coordination.servers > 0), f"{coordination}: {coordination.servers} servers")


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
