"""The options of a loader as one frozen value, checked at construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from shoal.errors import BadArgument, UnknownName

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class LoaderOptions:
    """How a dataset is read.

    Attributes:
        epochs: passes over the dataset.
        seed: with the epoch, decides the order; equal on every worker.
        shuffle: a new order each epoch; False keeps the dataset's. A stream always keeps its own.
        drop_last: leave out the last global batch of an epoch if it is smaller.
        collate: makes a batch of samples; by default torch's ``default_collate``.
        processes: DataLoader worker processes; 0 reads in this process. A stream takes 0 or 1.
        prefetch: batches that each such process reads ahead; without one none is read ahead.
        pin_memory: page-lock batches, on a machine with an accelerator.
        augments: samples have random augmentation (crops, flips): seed torch, ``random`` and numpy
            by (seed, epoch, sample) before each one, so that it is the same on any number of
            workers and after a restart. It takes about 10 microseconds a sample. A stream does not
            need it: its generators are always seeded by (seed, epoch).
    """

    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    collate: Collate | None = None
    processes: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    augments: bool = False

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("processes", 0), ("prefetch", 1)):
            check_int(name, getattr(self, name), least=least)
        check_int("seed", self.seed)
        if self.collate is not None and not callable(self.collate):
            raise BadArgument(f"collate={self.collate!r}", "must be a function of samples")

    @classmethod
    def named(cls, settings: dict[str, Any]) -> LoaderOptions:
        """Make options of keyword arguments; refuse an unknown one with the nearest names."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise UnknownName("loader option", name, known)
        return cls(**settings)


def check_int(name: str, value: object, *, least: int | None = None) -> int:
    """Return ``value`` if it is an int of at least ``least``; refuse bool and float."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadArgument(
            f"{name}={value!r}", f"must be an int, not {type(value).__name__}; pass a whole number"
        )
    if least is not None and value < least:
        raise BadArgument(f"{name}={value}", f"must be at least {least}")
    return value
