"""What each compressor of the catalogue costs: encoding and decoding a bucket of 25 MB, alone.

The flow is driven as a wire would, with nobody else there: what happens before its first ask is
encoding, the rest is decoding. Every sample in the catalogue's docstrings takes part, so a new
compressor is measured as soon as it exists.

Quantisers have bars in GB/s, without a peer to compare with, and a shared machine is slow at times
for seconds on end. So they are measured in several spells, and the best one counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.axes import compression
from shoal.axes.compression import Compressor, Trait, Value, error_feedback, topk
from shoal.bench.form import Bar, Result
from shoal.bench.suites import Settings
from shoal.errors import ShoalError
from shoal.flow import alone
from shoal.testing.contracts.member import make, samples

SIDE = 2560  # 26 MB
RATIO = 0.01
QUANTISERS = ("cast", "qsgd", "terngrad", "onebit", "twobit", "sign", "natural", "int8")
DETERMINISTIC, STOCHASTIC = ">= 1", ">= 0.4"
LEAST_TIMES, MOST_SECONDS = 5, 2.0
SPELLS = 3


class Cost(NamedTuple):
    """Seconds of one bucket."""

    encode: float
    decode: float

    @property
    def both(self) -> float:
        """Encoding and decoding."""
        return self.encode + self.decode


def costs(settings: Settings) -> Iterator[Result]:
    """Every compressor's cost, then the bars; the quick way only what has one."""
    torch.set_num_threads(1)
    bucket = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(settings.seed))
    functions: list[Callable[..., Compressor]] = [
        f for f in compression.MEMBERS if f.__name__ in QUANTISERS or not settings.quick
    ]
    quantisers: dict[str, list[float]] = {}
    for done, function in enumerate(functions):
        settings.progress(f"encode and decode: {function.__name__}", done, len(functions))
        for text in samples(function):
            with suppress(ShoalError):  # it needs what a bucket alone has not
                found = measure(make(text), bucket)
                yield _cost(text, found, bucket)
                if function.__name__ in QUANTISERS:
                    quantisers[text] = [found.encode]
    for spell in range(1, SPELLS):
        settings.progress("quantisers again", spell, SPELLS)
        for text, seconds in quantisers.items():
            seconds.append(measure(make(text), bucket).encode)
    speeds = [_speed(make(text), min(taken), bucket) for text, taken in quantisers.items()]
    yield from sorted(speeds, key=lambda row: row.metric)
    settings.progress("topk against torch.topk", 0, 1)
    yield against_plain(bucket)


def _cost(text: str, found: Cost, bucket: Tensor) -> Result:
    return Result(text, "encode and decode", found.both * 1e3 / (bucket.nbytes / 1e6), "ms/MB")


def _speed(compressor: Compressor, seconds: float, bucket: Tensor) -> Result:
    """Random numbers take time, so there is one bar for those who need them and one for others."""
    random = Trait.UNBIASED in compressor.traits and Trait.LOSSLESS not in compressor.traits
    bar, kind = (STOCHASTIC, "stochastic") if random else (DETERMINISTIC, "deterministic")
    speed = bucket.nbytes / seconds / 1e9
    holds = Bar.parse(bar).met(speed)
    return Result(compressor.name, f"encoding, {kind}", speed, "GB/s", bar=bar, holds=holds)


def measure(compressor: Compressor, bucket: Tensor) -> Cost:
    """The median over a few rounds; the first, which fills its memory, does not count."""
    state = compressor.init(Value(bucket, "weight"))
    found: list[Cost] = []
    begin, round = time.perf_counter(), 0
    while len(found) < LEAST_TIMES and (not found or time.perf_counter() - begin < MOST_SECONDS):
        cost, state = _once(compressor, bucket, state, round)
        if round > 0:
            found.append(cost)
        round += 1
    return Cost(median(c.encode for c in found), median(c.decode for c in found))


def _once(compressor: Compressor, bucket: Tensor, state: object, round: int) -> tuple[Cost, object]:
    flow = compressor.flow(Value(bucket.clone(), "weight"), state, round)
    begin = time.perf_counter()
    ask = next(flow)
    middle = time.perf_counter()
    while True:
        try:
            ask = flow.send(alone(ask))
        except StopIteration as end:
            return Cost(middle - begin, time.perf_counter() - middle), end.value.state


def against_plain(bucket: Tensor, pairs: int = 15) -> Result:
    """Our top-k with error feedback against the obvious one, in turns."""
    ours, plain = error_feedback(topk(RATIO)), plain_topk(bucket)
    state = ours.init(Value(bucket, "weight"))
    ratios, seconds = [], []
    for round in range(pairs + 1):
        cost, state = _once(ours, bucket, state, round)
        begin = time.perf_counter()
        plain()
        ratios.append(cost.both / (time.perf_counter() - begin))
        seconds.append(cost.both)
    ratio, bar = median(ratios[1:]), Bar.parse("<= 0.25")
    return Result(
        ours.name, "encode and decode", median(seconds[1:]) * 1e3, "ms", "plain torch.topk", ratio,
        bar=str(bar), holds=bar.met(ratio),
    )  # fmt: skip


def plain_topk(bucket: Tensor) -> Callable[[], Tensor]:
    """Top-k with error feedback as one writes it down first."""
    residual = torch.zeros(bucket.numel())
    count = int(RATIO * bucket.numel())

    def round() -> Tensor:
        nonlocal residual
        wanted = bucket.flatten() + residual
        where = wanted.abs().topk(count).indices
        values = wanted[where]
        residual = wanted.clone()
        residual[where] = 0
        return torch.zeros_like(wanted).index_add_(0, where, values)

    return round
