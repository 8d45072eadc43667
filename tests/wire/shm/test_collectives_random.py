"""Random sequences of collectives give what gloo gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_worlds import enter
from torch import Tensor

from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.int8)
SIZES = (0, 1, 3, 17, 1000, 4097, 70_001, 600_003)
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
Group = Any


def numbers(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Random numbers; small whole ones among the integers, so that nothing overflows."""
    source = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (numel,), generator=source).bool()
    if dtype.is_complex:
        return torch.randn(numel, generator=source, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 4, (numel,), generator=source).to(dtype)
    return torch.randn(numel, generator=source).to(dtype)


class Step:
    """One collective of a sequence; the same on every rank, but for ``rank``."""

    def __init__(self, choose: random.Random, rank: int, size: int) -> None:
        self.kind = choose.choice(sorted(KINDS))
        self.numel, self.root = choose.choice(SIZES), choose.randrange(size)
        self.dtype = choose.choice((*FLOATS, *WHOLE))
        exact = not self.dtype.is_floating_point
        bits = ("band", "bor", "bxor", "sum", "product", "min", "max")
        self.op = choose.choice(bits if exact else OPS[:5])
        self.later = choose.random() < 0.5
        self.seed, self.rank, self.size = choose.randrange(1 << 30), rank, size
        self.splits = [[choose.randrange(0, 900) for _ in range(size)] for _ in range(size)]

    def mine(self, numel: int | None = None, rank: int | None = None) -> Tensor:
        owner = self.rank if rank is None else rank
        return numbers(self.seed + owner, self.numel if numel is None else numel, self.dtype)

    def reduce_op(self) -> dist.ReduceOp:
        return getattr(dist.ReduceOp, self.op.upper())


def all_reduce(s: Step, group: Group) -> tuple[Any, list[Tensor]]:
    x = s.mine()
    return dist.all_reduce(x, s.reduce_op(), group=group, async_op=s.later), [x]


def reduce(s: Step, group: Group) -> tuple[Any, list[Tensor]]:
    x = s.mine()
    work = dist.reduce(x, group=group, group_dst=s.root, op=s.reduce_op(), async_op=s.later)
    return work, [x] if dist.get_rank(group) == s.root else []


def broadcast(s: Step, group: Group) -> tuple[Any, list[Tensor]]:
    x = s.mine()
    return dist.broadcast(x, group=group, group_src=s.root, async_op=s.later), [x]


def all_gather(s: Step, group: Group) -> tuple[Any, list[Tensor]]:
    out = [torch.zeros(s.numel, dtype=s.dtype) for _ in range(s.size)]
    return dist.all_gather(out, s.mine(), group=group, async_op=s.later), out


def gather(s: Step, group: Group) -> tuple[Any, list[Tensor]]:
    reads = dist.get_rank(group) == s.root
    out = [torch.zeros(s.numel, dtype=s.dtype) for _ in range(s.size)] if reads else None
    work = dist.gather(s.mine(), out, group=group, group_dst=s.root, async_op=s.later)
    return work, out or []


def scatter(s: Step, group: Group) -> tuple[Any, list[Tensor]]:
    x, gives = torch.zeros(s.numel, dtype=s.dtype), dist.get_rank(group) == s.root
    parts = [s.mine(rank=r) for r in range(s.size)] if gives else None
    return dist.scatter(x, parts, group=group, group_src=s.root, async_op=s.later), [x]


def reduce_scatter(s: Step, group: Group) -> tuple[Any, list[Tensor]]:
    x = torch.zeros(s.numel, dtype=s.dtype)
    parts = list(s.mine(s.numel * s.size).chunk(s.size)) if s.numel else [x.clone()] * s.size
    return dist.reduce_scatter(x, parts, s.reduce_op(), group=group, async_op=s.later), [x]


def all_to_all_single(s: Step, group: Group) -> tuple[Any, list[Tensor]]:
    me = dist.get_rank(group)
    give, take = s.splits[me], [row[me] for row in s.splits]
    out = torch.zeros(sum(take), dtype=s.dtype)
    x = s.mine(sum(give))
    return dist.all_to_all_single(out, x, take, give, group=group, async_op=s.later), [out]


KINDS: dict[str, Callable[[Step, Group], tuple[Any, list[Tensor]]]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "all_to_all_single": all_to_all_single,
    "broadcast": broadcast,
    "gather": gather,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "scatter": scatter,
}


def sequence(seed: int, steps: int) -> int:
    """Run a random sequence on shoal and on gloo, in the whole group and in a part of it."""
    rank, size = enter()
    both = [(None, dist.new_group(backend="gloo"), size)]
    part = list(range(1, size))
    ours, theirs = dist.new_group(part, backend="shoal"), dist.new_group(part, backend="gloo")
    if rank in part and len(part) > 1:
        both.append((ours, theirs, len(part)))
    choose, pending, compared = random.Random(seed), [], 0
    for _ in range(steps):
        plan, small = choose.randrange(1 << 30), choose.random() < 0.3 and size > 2
        if not small or len(both) > 1:
            mine, other, n = both[-1] if small else both[0]
            step = Step(random.Random(plan), dist.get_rank(mine), n)
            work, got = KINDS[step.kind](step, mine)
            pending.append((step, work, got, other))
        if choose.random() < 0.5:
            compared += settle(pending)
    return compared + settle(pending)


def settle(pending: list[Any]) -> int:
    """Wait for what is under way, then do the same on gloo and compare."""
    for _, work, _, _ in pending:
        if work is not None:
            work.wait()
    compared = 0
    for step, _, got, other in pending:
        step.later = False
        if unknown_to_gloo(step):
            continue
        _, expected = KINDS[step.kind](step, other)
        for x, y in zip(got, expected, strict=True):
            compare(step, x, y)
            compared += 1
    pending.clear()
    return compared


def unknown_to_gloo(step: Step) -> bool:
    """gloo of torch 2.13 takes no such reduction: it raises, or kills the process."""
    return step.kind in ("reduce", "reduce_scatter") and step.op == "avg"


def compare(step: Step, got: Tensor, expected: Tensor) -> None:
    told = step.kind, step.op, step.dtype, step.numel
    rounds = step.op in ("sum", "avg", "product") and step.dtype.is_floating_point
    exact = "reduce" not in step.kind or not rounds
    if exact or step.size == 2:  # there is but one order of two
        assert torch.equal(got, expected), told
        return
    inputs = step.size if step.kind == "reduce_scatter" else 1
    parts = [step.mine(step.numel * inputs, rank=r).double().abs() for r in range(step.size)]
    magnitudes = torch.stack(parts).view(step.size, inputs, step.numel)[:, step.rank % inputs]
    assert bool(((got.double() - expected.double()).abs() <= bound(step, magnitudes)).all()), told


def bound(step: Step, magnitudes: Tensor) -> Tensor:
    """How far two orders of summing may be apart: (n - 1) eps sum|x|.

    Each of the n - 1 additions rounds by eps / 2 of a partial sum at most, in either of the two. Of
    a mean, every term is an nth, and its division rounds once more. A product may besides fall
    below the normal numbers, where roundings are no longer relative.
    """
    eps, tiny = torch.finfo(step.dtype).eps, torch.finfo(step.dtype).smallest_normal
    if step.op == "product":
        return (step.size - 1) * eps * magnitudes.prod(0) + tiny
    if step.op == "avg":
        return step.size * eps * magnitudes.mean(0)
    return (step.size - 1) * eps * magnitudes.sum(0)


@pytest.mark.parametrize(
    ("ranks", "seed", "direct"), [(2, 0, "inf"), (2, 1, "0"), (3, 2, "inf"), (4, 3, "0")]
)
def test_a_random_sequence_gives_what_gloo_gives(ranks: int, seed: int, direct: str) -> None:
    env = {"SHOAL_SHM_DIRECT_MB": direct}
    assert sum(run_workers(ranks, sequence, seed, 40, env=env)) > 20
