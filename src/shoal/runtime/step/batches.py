"""A loader inside a run: its waits are spans, its position is saved with the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shoal.runtime.team import Team
from shoal.samples.loader import Loader, make


class Feed:
    """Iterates a loader and notes how long each batch took to come.

    Args:
        loader: my part of the data.
        team: whose recorder notes it.

    Attributes:
        number: of the step to come.
        busy: a batch was yielded and the loop has not asked for the next.
        opening: called before the first batch of a loop.
        closing: called when the loop is done with a batch.
    """

    def __init__(self, loader: Loader, team: Team) -> None:
        self.loader = loader
        self.team = team
        self.number = 0
        self.busy = False
        self.opening: Callable[[], None] = _nothing
        self.closing: Callable[[], None] = _nothing

    @classmethod
    def made(cls, dataset: Any, batch_size: int, *, team: Team, options: Mapping[str, Any]) -> Feed:
        """A feed over a new loader."""
        return cls(make(dataset, batch_size, share=team.share, **options), team)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.opening()
        start = time.perf_counter()
        for batch in self.loader:
            seconds = time.perf_counter() - start
            self.team.recorder.add("data", "next batch", start, seconds, 0, self.number)
            self.busy = True
            try:
                yield batch
            finally:  # a loop may also be left
                self.busy = False
            self.closing()
            start = time.perf_counter()

    def by_epoch(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """Epoch after epoch, each with its batches: what comes between them survives a restart.

        ``for epoch, batches in feed.by_epoch(): ...`` A resumed run goes on inside the epoch where
        it stood, and does not repeat what followed the ones before.
        """
        self.loader.turn_page()
        while self.loader.epoch < self.loader.options.epochs:
            yield self.loader.epoch, self._to_the_end_of_the_epoch()

    def _to_the_end_of_the_epoch(self) -> Iterator[Any]:
        for batch in self:
            yield batch
            if self.loader.turn_page():
                self.closing()
                return

    @property
    def epoch(self) -> int:
        """The epoch of the last batch."""
        return self.loader.epoch

    def state_dict(self) -> dict[str, int]:
        """Where in the data we stand."""
        return self.loader.state_dict()

    def check(self, state: Mapping[str, int]) -> None:
        """Refuse another loader's state, without going there."""
        self.loader.check(state)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self.loader.load_state_dict(state)


def _nothing() -> None:
    """A loader outside of a run has nothing to do in between."""
