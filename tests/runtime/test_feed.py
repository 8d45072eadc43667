"""Epochs one by one: the same batches as in one loop, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.runtime.step.batches import RunLoader
from shoal.testing.trainer import digits, tiny

SAMPLES = TensorDataset(*digits(20)[0])


def made(where: Path | None = None) -> shoal.Run:
    model, optimizer = tiny()
    loss = torch.nn.functional.cross_entropy
    return shoal.distribute(model, optimizer, loss=loss, checkpoint=where, every=2)


def ids(feed: RunLoader) -> list[tuple[int, ...]]:
    return [tuple(feed.loader.ids) for _ in feed]


@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_one_by_one_are_the_same_batches(drop_last: bool) -> None:
    run = made()
    whole = ids(run.loader(SAMPLES, 8, epochs=3, seed=4, drop_last=drop_last))
    feed = run.loader(SAMPLES, 8, epochs=3, seed=4, drop_last=drop_last)
    seen = []
    for epoch, batches in feed.by_epoch():
        for _ in batches:
            seen.append((epoch, tuple(feed.loader.ids)))
    assert [found for _, found in seen] == whole
    assert [epoch for epoch, _ in seen] == sorted([0, 1, 2] * (len(whole) // 3))


def test_a_resumed_run_goes_on_inside_its_epoch(tmp_path: Path) -> None:
    def train(run: shoal.Run, stop: int | None) -> list[tuple[str, int]]:
        told = []
        feed = run.loader(SAMPLES, 8, epochs=3)
        for epoch, batches in feed.by_epoch():
            for batch in batches:
                told.append(("step", run.step(batch).number))
                if run.steps == stop:
                    run.save()
                    return told
            told.append(("validated", epoch))
        return told

    run = made(tmp_path)
    before = train(run, 4)
    resumed = made(tmp_path)
    assert resumed.restore()
    assert before + train(resumed, None) == train(made(), None)


def test_a_stream_without_length_says_what_to_do() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(4))

    feed = made().loader(Stream(), 2, epochs=1)
    with pytest.raises(UsageError, match="loop over the loader"):
        next(feed.by_epoch())
