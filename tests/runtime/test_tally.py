"""Weights of micro-batches: whatever is agreed on is the mean over samples."""

from __future__ import annotations

import pytest

from shoal.runtime.step.stats import StepStats


@pytest.mark.parametrize("weighted", [True, False])
def test_weights_of_one_global_batch_make_its_mean(weighted: bool) -> None:
    parts = [3, 2, 2]
    scales = []
    for mine in parts:
        stats = StepStats(weighted=weighted, together=True)
        stats.open(mine, lambda: sum(parts))
        scales.append(stats.scale(mine, len(parts)))
    agreed = sum(scales) if weighted else sum(scales) / len(parts)
    assert agreed == pytest.approx(1)
    assert scales[0] / scales[1] == pytest.approx(3 / 2)


def test_shards_of_one_replica_weigh_by_their_samples() -> None:
    parts = [3, 2]
    scales = []
    for mine in parts:
        stats = StepStats(weighted=False, together=False, shards=2)
        stats.open(mine, lambda: sum(parts))
        scales.append(stats.scale(mine, 4))
    assert sum(scales) / 2 == pytest.approx(1)  # torch takes the mean over the shards
    assert scales[0] / scales[1] == pytest.approx(3 / 2)
