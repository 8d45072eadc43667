"""Hierarchical all-reduce: first inside groups of workers, then across groups.

Links inside a host are faster than links between hosts. So ``inner`` workers with consecutive ranks
form a group, because launchers give consecutive ranks to the workers of a host:

1. reduce-scatter inside each group: each worker gets one slice, summed over its group;
2. all-reduce across groups, by the ``outer`` route: among the workers with the same slice, one of
   each group;
3. all-gather inside each group.

Every worker takes part in step 2, not only one leader of each group, so the all-reduce of a worker
over the slow links has only ``1 / inner`` of the message.

References:
    Mikami et al., `Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash
    <https://arxiv.org/abs/1811.05233>`_, 2018 (the same steps, on a torus).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.axes.collectives.ring import ring
from shoal.errors import BadArgument
from shoal.notation import is_whole


def hierarchical(inner: int, outer: Collective | None = None) -> Collective:
    """Reduce-scatter inside groups, all-reduce the slices across groups, all-gather inside groups.

    Args:
        inner: workers per group; the number of workers must be a multiple of it.
        outer: the route across groups; by default a ring.

    Example: ``hierarchical(2)``, ``hierarchical(2, tree)``.
    """
    across = ring() if outer is None else outer
    arguments = f"{inner}" if across == ring() else f"{inner}, {across}"
    return nested(f"hierarchical({arguments})", inner, across)


def nested(name: str, inner: int, outer: Collective) -> Collective:
    """Return a route ``name`` with groups of ``inner`` ranks and route ``outer`` across groups."""
    if not is_whole(inner, 1, 65536):
        raise BadArgument(name, f"a group size must be a whole number >= 1, not {inner!r}")
    if not isinstance(outer, Collective) or outer.rounds is None:
        raise BadArgument(name, "the route across groups must have rounds, such as ring or tree")
    return Collective(
        name,
        rounds=partial(_rounds, inner, outer),
        chunks=partial(_chunks, inner, outer),
        refusal=partial(_refusal, inner, outer),
    )


def _refusal(inner: int, outer: Collective, world: int) -> str:
    if world == 1:
        return ""
    if world % inner:
        return f"{world} workers cannot be divided into groups of {inner}"
    return outer.refusal(world // inner)


def _chunks(inner: int, outer: Collective, world: int) -> int:
    return 1 if world == 1 else inner * outer.chunks(world // inner)


def _rounds(inner: int, outer: Collective, world: int) -> Iterator[Round]:
    if why := _refusal(inner, outer, world):
        raise BadArgument(f"groups of {inner}", why)
    if world == 1 or outer.rounds is None:
        return
    groups = world // inner
    slice_chunks = outer.chunks(groups)
    for t in range(inner - 1):  # afterwards the i-th worker of each group has slice i
        yield _around(world, inner, slice_chunks, back=t + 1)
    for copies in outer.rounds(groups):
        yield tuple(
            Copy(source * inner + i, target * inner + i, i * slice_chunks + chunk, add)
            for i in range(inner)
            for source, target, chunk, add in copies
        )
    for t in range(inner - 1):
        yield _around(world, inner, slice_chunks, back=t, add=False)


def _around(world: int, inner: int, chunks: int, *, back: int, add: bool = True) -> Round:
    """Return a round in which the i-th rank of each group sends slice ``i - back`` to the next."""
    copies = []
    for rank in range(world):
        first, i = rank - rank % inner, rank % inner
        part = (i - back) % inner
        target = first + (i + 1) % inner
        copies += [Copy(rank, target, part * chunks + c, add) for c in range(chunks)]
    return tuple(copies)
