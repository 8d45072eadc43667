"""Laws of every collective. Its route is proved on multisets of ranks, and run on numbers."""

from __future__ import annotations

from functools import partial

import torch

from shoal.axes.collectives import Collective, Network, prove
from shoal.errors import UsageError
from shoal.testing.contracts.require import close, require

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


def served(collective: Collective) -> tuple[int, ...]:
    """Return the ``WORLDS`` that a collective accepts, or () if it has no rounds."""
    if collective.rounds is None:
        return ()
    return tuple(world for world in WORLDS if not collective.refusal(world))


def every_rank_ends_with_every_part_once(collective: Collective) -> None:
    """On multisets of ranks, every rank ends with the part of every rank exactly once."""
    for world in served(collective):
        prove(collective, world)


def a_world_that_is_refused_gets_no_rounds(collective: Collective) -> None:
    """A single worker is accepted. ``rounds`` raises for every world size that is refused."""
    require(not collective.refusal(1), f"{collective}: it refuses a single worker")
    for world in WORLDS:
        if collective.rounds is not None and collective.refusal(world):
            try:
                rounds = list(collective.rounds(world))
            except UsageError:
                continue
            count = len(rounds)
            raise AssertionError(f"{collective}: it refuses {world} ranks, but has {count} rounds")


def it_chooses_among_routes_that_serve(collective: Collective) -> None:
    """The chosen route accepts the world size, and has no ``choose`` itself.

    If there are ``contenders``, the first is native, and the others accept the world size.
    """
    for world in WORLDS if collective.choose else ():
        for nbytes in (1, 2**12, 2**20, 2**30):
            for alpha, native in ((1e-4, 1.0), (0.0, 1.0), (1.0, 1e-9)):
                network = Network(partial(_line, alpha), partial(_line, native))
                chosen = collective.choose(nbytes, world, network) if collective.choose else None
                fits = chosen is not None and not chosen.refusal(world) and chosen.choose is None
                require(fits, f"{collective}, {world} ranks: it chose {chosen}, which cannot run")
                if collective.contenders is not None:
                    first, *others = collective.contenders(nbytes, world, network)
                    serve = not any(route.refusal(world) for route in others)
                    label = f"{collective}, {world} ranks: it cannot time {first}, {others}"
                    require(first.is_native and serve, label)


def _line(alpha: float, nbytes: float) -> float:
    return alpha + 1e-9 * nbytes


def all_ranks_hold_the_same_bits(collective: Collective) -> None:
    """After a run on numbers, every rank has the sum, rounded to the same bits."""
    for world in served(collective):
        chance = torch.Generator().manual_seed(world)
        values = torch.randn(world, collective.chunks(world), generator=chance)
        total = values.sum(0)
        values = _run(collective, world, values)
        label = f"{collective}, {world} ranks"
        require(close(values[0], total, 1e-5), f"{label}: the result is not the sum")
        require(bool((values == values[0]).all()), f"{label}: the ranks' bits differ")


def rounds_are_the_same_each_time(collective: Collective) -> None:
    """Every rank computes the route itself, so ``rounds`` must always return the same route."""
    for world in served(collective):
        require(collective.chunks(world) >= 1, f"{collective}, {world} ranks: it has no chunk")
        if collective.rounds is not None:
            one, two = (list(collective.rounds(world)) for _ in range(2))
            require(one == two, f"{collective}, {world} ranks: two calls return different routes")


def _run(collective: Collective, world: int, values: torch.Tensor) -> torch.Tensor:
    for copies in collective.rounds(world) if collective.rounds else ():
        after = values.clone()
        for source, target, chunk, add in copies:
            own = after[target, chunk] if add else 0.0
            after[target, chunk] = own + values[source, chunk]
        values = after
    return values


LAWS = (
    every_rank_ends_with_every_part_once,
    a_world_that_is_refused_gets_no_rounds,
    it_chooses_among_routes_that_serve,
    all_ranks_hold_the_same_bits,
    rounds_are_the_same_each_time,
)
