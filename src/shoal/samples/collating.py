"""Collate samples, and say which of them stands out when that fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.errors import UsageError
from shoal.samples.options import Collate

SHOWN = 8


class Read(list[Any]):
    """Samples of one batch, and where in the dataset they stand."""

    def __init__(self, samples: Sequence[Any], indices: Sequence[int]) -> None:
        super().__init__(samples)
        self.indices = indices


@dataclass(frozen=True)
class Named:
    """A collate function whose errors name the samples."""

    collate: Collate

    def __call__(self, samples: list[Any]) -> Any:
        """The batch."""
        try:
            return self.collate(list(samples))
        except Exception as error:
            places = samples.indices if isinstance(samples, Read) else range(len(samples))
            raise UsageError(
                f"{_apart(samples, places)}, so they make no batch: {error!r}; make all samples "
                "alike, or pass collate=..."
            ) from error


def _apart(samples: Sequence[Any], places: Sequence[int]) -> str:
    """The first sample that does not look like the first of all."""
    looks = [_look(sample) for sample in samples]
    for place, look in zip(places, looks, strict=True):
        if look != looks[0]:
            return f"sample {place} is {look}, but sample {places[0]} is {looks[0]}"
    more = ", ..." if len(places) > SHOWN else ""
    return f"samples {', '.join(map(str, places[:SHOWN]))}{more} are each {looks[0]}"


def _look(sample: Any) -> str:
    if sample is None:
        return "None"
    if isinstance(sample, Tensor):
        return f"a {str(sample.dtype).removeprefix('torch.')} tensor of shape {tuple(sample.shape)}"
    if isinstance(sample, tuple | list | Mapping) and len(sample) > SHOWN:
        return f"a {type(sample).__name__} of {len(sample)}"
    if isinstance(sample, tuple | list):
        return f"({', '.join(map(_look, sample))})"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_look(value)}" for key, value in sample.items()) + "}"
    return f"a {type(sample).__name__}"
