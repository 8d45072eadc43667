"""Gossip: average with neighbours in a graph; disagreement shrinks with its spectral gap.

With bsp this is D-PSGD: parameters are sent while the gradient is computed, and each worker's next
model is its row of W times the models, minus its own step. With asp it is AD-PSGD: after each step
a worker averages with one random neighbour, and no other worker waits.

References:
    Lian et al., `Can decentralized algorithms outperform centralized algorithms?
    <https://arxiv.org/abs/1705.09056>`_, 2017 (D-PSGD).
    Lian et al., `Asynchronous decentralized parallel SGD <https://arxiv.org/abs/1710.06952>`_,
    2018 (AD-PSGD).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.axes.coordination.coordination import Coordination
from shoal.errors import UnknownName


def gossip(graph: str = "ring") -> Coordination:
    """Average models with the neighbours in a graph; the final model is the mean of all.

    Args:
        graph: of neighbours; in a ``ring`` each worker has one on either side.
    """
    if graph not in GRAPHS:
        raise UnknownName("gossip graph", str(graph), GRAPHS)
    return Coordination(f"gossip({graph})", "peers", "parameter", GRAPHS[graph])


def ring(workers: int, round: int) -> Tensor:
    """Return W of a ring: weights of 1/3 for a worker and both neighbours, 1/2 for two workers."""
    w = torch.eye(workers, dtype=torch.float64)
    neighbours = {d % workers for d in (-1, 1)} - {0}
    share = 1 / (1 + len(neighbours))
    for worker in range(workers):
        w[worker, worker] = share
        for step in neighbours:
            w[worker, (worker + step) % workers] = share
    return w


GRAPHS = {"ring": ring}
