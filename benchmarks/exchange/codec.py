"""What each compressor of the catalogue costs: encoding and decoding a bucket of 25 MB, alone.

The flow is driven as a wire would, without other ranks: what happens before its first ask is
encoding, the rest is decoding. Every sample in the catalogue's docstrings takes part, so a new
compressor is measured as soon as it exists.

Quantisers have thresholds in GB/s, without a peer to compare with, and a shared machine may be slow
for seconds at a time. So they are measured several times, and the best time counts.
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
from shoal.bench.report import Result, Threshold
from shoal.bench.suites import BenchSettings
from shoal.errors import ShoalError
from shoal.flow import alone
from shoal.testing.contracts.member import make, samples

SIDE = 2560  # 26 MB
RATIO = 0.01
QUANTISERS = ("cast", "qsgd", "terngrad", "onebit", "twobit", "sign", "natural", "int8")
DETERMINISTIC, STOCHASTIC = ">= 1", ">= 0.4"
LEAST_TIMES, MOST_SECONDS = 5, 2.0
REPEATS = 3


class Cost(NamedTuple):
    """Seconds of one bucket."""

    encode: float
    decode: float

    @property
    def both(self) -> float:
        """Seconds of encoding and decoding."""
        return self.encode + self.decode


def costs(settings: BenchSettings) -> Iterator[Result]:
    """Yield every compressor's cost, then the thresholds; if quick, only of quantisers."""
    torch.set_num_threads(1)
    bucket = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(settings.seed))
    functions: list[Callable[..., Compressor]] = [
        f for f in compression.MEMBERS if f.__name__ in QUANTISERS or not settings.quick
    ]
    quantisers: dict[str, list[float]] = {}
    for done, function in enumerate(functions):
        settings.progress(f"encode and decode: {function.__name__}", done, len(functions))
        for text in samples(function):
            with suppress(ShoalError):  # it needs more than a bucket
                cost = measure(make(text), bucket)
                per_megabyte = cost.both * 1e3 / (bucket.nbytes / 1e6)
                yield Result(text, "encode and decode", per_megabyte, "ms/MB")
                if function.__name__ in QUANTISERS:
                    quantisers[text] = [cost.encode]
    for repeat in range(1, REPEATS):
        settings.progress("quantisers again", repeat, REPEATS)
        for text, seconds in quantisers.items():
            seconds.append(measure(make(text), bucket).encode)
    speeds = [_speed(make(text), min(seconds), bucket) for text, seconds in quantisers.items()]
    yield from sorted(speeds, key=lambda row: row.metric)
    settings.progress("topk against torch.topk", 0, 1)
    yield against_plain(bucket)


def _speed(compressor: Compressor, seconds: float, bucket: Tensor) -> Result:
    """Judge a speed; random numbers take time, so stochastic quantisers have a lower threshold."""
    random = Trait.UNBIASED in compressor.traits and Trait.LOSSLESS not in compressor.traits
    threshold, kind = (STOCHASTIC, "stochastic") if random else (DETERMINISTIC, "deterministic")
    speed = bucket.nbytes / seconds / 1e9
    passes = Threshold.parse(threshold).met(speed)
    return Result(
        compressor.name, f"encoding, {kind}", speed, "GB/s", threshold=threshold, passes=passes
    )


def measure(compressor: Compressor, bucket: Tensor) -> Cost:
    """Return the median over a few rounds; the first, which allocates memory, does not count."""
    state = compressor.init(Value(bucket, "weight"))
    rounds: list[Cost] = []
    begin, round = time.perf_counter(), 0
    while len(rounds) < LEAST_TIMES and (not rounds or time.perf_counter() - begin < MOST_SECONDS):
        cost, state = _once(compressor, bucket, state, round)
        if round > 0:
            rounds.append(cost)
        round += 1
    return Cost(median(c.encode for c in rounds), median(c.decode for c in rounds))


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
    """Time our top-k with error feedback against a simple one, in turns."""
    ours, plain = error_feedback(topk(RATIO)), plain_topk(bucket)
    state = ours.init(Value(bucket, "weight"))
    ratios, seconds = [], []
    for round in range(pairs + 1):
        cost, state = _once(ours, bucket, state, round)
        begin = time.perf_counter()
        plain()
        ratios.append(cost.both / (time.perf_counter() - begin))
        seconds.append(cost.both)
    ratio, threshold = median(ratios[1:]), Threshold.parse("<= 0.25")
    return Result(
        ours.name,
        "encode and decode",
        median(seconds[1:]) * 1e3,
        "ms",
        "plain torch.topk",
        ratio,
        threshold=str(threshold),
        passes=threshold.met(ratio),
    )


def plain_topk(bucket: Tensor) -> Callable[[], Tensor]:
    """Return the simplest implementation of top-k with error feedback."""
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
