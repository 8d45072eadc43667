"""The options of a loader, as an immutable dataclass that checks its values."""

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
        epochs: number of passes over the dataset.
        seed: seed of the order of samples of each epoch. It must be equal on all workers.
        shuffle: whether each epoch has a new random order. A stream always keeps its own order.
        drop_last: whether to leave out the last global batch of an epoch if it is not full.
        collate: function that makes a batch from a list of samples. None means ``default_collate``.
        processes: number of DataLoader processes. With 0, this process reads. Streams allow 0 or 1.
        prefetch: number of batches that each of these processes reads ahead.
        pin_memory: whether to page-lock batches. This has no effect without an accelerator.
        augments: whether reading a sample uses random numbers (crops, flips). If True, torch,
            ``random`` and numpy are seeded by (seed, epoch, sample) before each sample. Then a
            sample is the same on any number of workers and after a restart. This takes about 10
            microseconds per sample. A stream ignores this and is always seeded by (seed, epoch).
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
            raise BadArgument(f"collate={self.collate!r}", "collate must be a function")

    @classmethod
    def named(cls, settings: dict[str, Any]) -> LoaderOptions:
        """Return the options with these values; raise UnknownName if there is no such option."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise UnknownName("loader option", name, known)
        return cls(**settings)


def check_int(name: str, value: object, *, least: int | None = None) -> int:
    """Return ``value``; raise a BadArgument unless it is an int (no bool) of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadArgument(
            f"{name}={value!r}", f"must be an int, not {type(value).__name__}; pass a whole number"
        )
    if least is not None and value < least:
        raise BadArgument(f"{name}={value}", f"must be at least {least}")
    return value
