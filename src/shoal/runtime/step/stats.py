"""A few numbers that every step agrees on besides gradients: loss, samples, what is missing.

They travel as one small message behind the gradients, so that they cost next to nothing, and every
worker sees every worker's: whoever has a NaN is named.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import NonFinite
from shoal.wire.pending import gather_flat

WIDTH = 4


class Word(NamedTuple):
    """What one worker says of its step."""

    loss: float  # sum over its samples
    samples: float
    unused: float  # parameters without a gradient
    bad: float  # 1: my loss is NaN or inf


SILENT = Word(0.0, 0.0, 0.0, 0.0)


class Table(NamedTuple):
    """What all workers said."""

    words: tuple[Word, ...]
    copies: int = 1  # ranks that speak of the same samples: those that share a model

    @property
    def loss(self) -> float:
        """Mean over all samples; NaN when a part of it is not finite."""
        if self.bad_ranks():
            return math.nan
        samples = sum(word.samples for word in self.words)
        return sum(word.loss for word in self.words) / samples if samples else math.nan

    @property
    def samples(self) -> int:
        """Of all workers, each once."""
        return round(sum(word.samples for word in self.words) / self.copies)

    @property
    def unused(self) -> bool:
        """Whether anybody lacks a gradient."""
        return any(word.unused for word in self.words)

    def bad_ranks(self) -> list[int]:
        """Workers whose loss is not a number."""
        return [rank for rank, word in enumerate(self.words) if word.bad]


class Asked(NamedTuple):
    """A table under way."""

    everyone: Tensor
    work: dist.Work | None
    copies: int = 1

    def wait(self) -> Table:
        """The table."""
        if self.work is not None:
            self.work.wait()
        return table_of(self.everyone, copies=self.copies)


def table_of(numbers: Tensor, *, copies: int = 1) -> Table:
    """Everybody's word, from their numbers one after the other."""
    return Table(tuple(Word(*row) for row in numbers.view(-1, WIDTH).tolist()), copies)


def put(word: Word, numbers: Tensor, worker: int) -> None:
    """Write my word into its own place; a sum over workers then holds everybody's."""
    row = [0.0] * numbers.numel()
    row[WIDTH * worker : WIDTH * (worker + 1)] = word
    numbers.copy_(torch.tensor(row, dtype=numbers.dtype))


def tell(word: Word, *, size: int, copies: int = 1) -> Asked:
    """Say my word and ask for everybody's.

    Args:
        word: mine.
        size: how many ranks speak.
        copies: how many of them speak of the same samples.
    """
    mine = torch.tensor(word, dtype=torch.float64)
    if size == 1:
        return Asked(mine, None)
    everyone = torch.empty(size * WIDTH, dtype=torch.float64)
    return Asked(everyone, gather_flat(everyone, mine, async_op=True), copies)


class Absent(NamedTuple):
    """Under way: which parameters got a gradient on no worker."""

    names: list[str]
    present: Tensor
    work: dist.Work | None

    def wait(self) -> set[str]:
        """Their names."""
        if self.work is not None:
            self.work.wait()
        seen = self.present.tolist()
        return {name for name, here in zip(self.names, seen, strict=True) if not here}


def absent(unused: set[str], names: list[str], group: dist.ProcessGroup | None) -> Absent:
    """Say whose gradient did not come to me, and ask whose came to nobody."""
    present = torch.tensor([name not in unused for name in names], dtype=torch.uint8)
    if group is None and not dist.is_initialized():
        return Absent(names, present, None)
    work = dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group, async_op=True)
    return Absent(names, present, work)


def nonfinite(what: str, step: int, ranks: list[int]) -> NonFinite:
    """The error that names step and ranks."""
    who = "rank " + ", ".join(map(str, ranks)) if ranks else "all ranks"
    return NonFinite(
        f"{what} is NaN or inf at step {step} on {who}: lower the learning rate, clip, or look at "
        "that batch; nonfinite='skip' leaves such steps out on all workers"
    )
