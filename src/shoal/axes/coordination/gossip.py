"""Gossip: each worker averages its model with its neighbours in a graph.

The larger the spectral gap of the graph's mixing matrix W, the faster models become equal. With
bsp this is D-PSGD: parameters are sent while the gradient is computed, and worker i continues from
the mean of models with the weights ``W[i]``, plus its own optimizer step. With asp it is AD-PSGD:
after each step a worker averages with one random neighbour, and no other worker waits.

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
    """Average models with the neighbours in a graph. The final model is the mean over all workers.

    Args:
        graph: which workers are neighbours. Only ``ring`` exists, in which the neighbours are the
            next lower and the next higher rank.
    """
    if graph not in GRAPHS:
        raise UnknownName("gossip graph", str(graph), GRAPHS)
    return Coordination(f"gossip({graph})", "peers", "parameter", GRAPHS[graph])


def ring(workers: int, round: int) -> Tensor:
    """Return the mixing matrix of a ring. Weights are 1/3 (1/2 for two workers, 1 for one)."""
    w = torch.eye(workers, dtype=torch.float64)
    neighbours = {offset % workers for offset in (-1, 1)} - {0}
    share = 1 / (1 + len(neighbours))
    for worker in range(workers):
        w[worker, worker] = share
        for offset in neighbours:
            w[worker, (worker + offset) % workers] = share
    return w


GRAPHS = {"ring": ring}
