"""Laws of every collective: the proof, and the same copies on numbers."""

from __future__ import annotations

import torch

from shoal.axes.collectives import Collective, prove
from shoal.testing.contracts.require import close, require

WORLDS = (1, 2, 3, 4, 5, 7, 8, 16)


def every_rank_ends_with_every_part_once(collective: Collective) -> None:
    """Proved on multisets of ranks, where nothing can cancel."""
    for world in WORLDS:
        prove(collective, world)


def all_ranks_hold_the_same_bits(collective: Collective) -> None:
    """On numbers, every rank ends with the sum, and with the same rounding of it."""
    for world in WORLDS if collective.rounds else ():
        chance = torch.Generator().manual_seed(world)
        chunks = collective.chunks(world)
        held = torch.randn(world, chunks, generator=chance)
        total = held.sum(0)
        held = _run(collective, world, held)
        require(close(held[0], total, 1e-5), f"{collective}, {world} ranks: not the sum")
        require(bool((held == held[0]).all()), f"{collective}, {world} ranks: bits differ")


def rounds_are_the_same_each_time(collective: Collective) -> None:
    """Every rank works the route out for itself, so it must come out the same."""
    for world in WORLDS if collective.rounds else ():
        require(collective.chunks(world) >= 1, f"{collective}, {world} ranks: no chunk")
        rounds = collective.rounds
        if rounds is not None:
            same = list(rounds(world)) == list(rounds(world))
            require(same, f"{collective}, {world} ranks: another route when asked twice")


def _run(collective: Collective, world: int, held: torch.Tensor) -> torch.Tensor:
    for copies in collective.rounds(world) if collective.rounds else ():
        after = held.clone()
        for source, target, chunk, add in copies:
            kept = after[target, chunk] if add else 0.0
            after[target, chunk] = kept + held[source, chunk]
        held = after
    return held


LAWS = (
    every_rank_ends_with_every_part_once,
    all_ranks_hold_the_same_bits,
    rounds_are_the_same_each_time,
)
