"""The settings of a loader as one frozen value, refused at construction when they make no sense."""

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
        drop_last: leave out the last global batch of an epoch when it is smaller.
        collate: samples to a batch; torch's ``default_collate`` when None.
        processes: DataLoader worker processes; 0 reads in this one. A stream takes 0 or 1.
        prefetch: batches each such process reads ahead; nothing is read ahead without one.
        pin_memory: page-lock batches, on a machine with an accelerator.
        augments: samples are drawn at random (crops, flips): seed torch, ``random`` and numpy by
            (seed, epoch, sample) before each one, so that augmentation is the same on any number
            of workers and after a restart. About 10 microseconds a sample. A stream needs no such
            thing: its generators are always seeded by (seed, epoch).
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
            whole(name, getattr(self, name), least=least)
        whole("seed", self.seed)
        if self.collate is not None and not callable(self.collate):
            raise BadArgument(f"collate={self.collate!r}", "must be a function of samples")

    @classmethod
    def named(cls, settings: dict[str, Any]) -> LoaderOptions:
        """Options from keyword arguments; an unknown one is refused with the nearest names."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise UnknownName("loader option", name, known)
        return cls(**settings)


def whole(name: str, value: object, *, least: int | None = None) -> int:
    """``value`` as an int of at least ``least``; bool and float are refused, not rounded."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadArgument(
            f"{name}={value!r}", f"must be an int, not {type(value).__name__}; pass a whole number"
        )
    if least is not None and value < least:
        raise BadArgument(f"{name}={value}", f"must be at least {least}")
    return value
