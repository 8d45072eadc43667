"""An adaptive schedule on a link that is cut in mid-run, step by step in virtual time."""

from __future__ import annotations

import pytest

from shoal.analysis.links import Link
from shoal.axes.scheduling import Layer, Task, adaptive
from shoal.runtime.tuning.choose import ScheduleChoice, ScheduleTuner
from shoal.runtime.tuning.measure import MeasurementLayout, StepRecord, mean_nbytes
from shoal.simulate.schedule import schedule_seconds

MB = 2**20
MODELS = {
    "one large layer": (MB, *(2**12,) * 8, 16 * MB, 2**12),
    "equal layers": (4 * MB,) * 8,
    "many small ones": (2**14,) * 60,
}
SETTLED = 55  # steps after which a decision stands


class Training:
    """Steps played by the simulator on a link that may change between any two of them."""

    def __init__(self, sizes: tuple[int, ...], link: Link) -> None:
        self.layers = [Layer(f"l{i}", n, n * 5e-10, n * 1e-9) for i, n in enumerate(sizes)]
        self.schedule, self.link, self.steps = adaptive(), link, 0
        self.choice = ScheduleTuner(self.schedule, [Layer(x.name, x.nbytes) for x in self.layers])
        self.tasks = self.schedule.plan(self.layers, link.cost)
        self.decided: list[tuple[int, ScheduleChoice]] = []
        self._window: list[tuple[StepRecord, float]] = []

    def step(self) -> None:
        """One step; after so many of them all are looked at, as in a run."""
        seconds, spans = schedule_seconds(self.tasks, self.layers, self.link.cost)
        record = StepRecord(0.0)
        record.arrivals = {s.name.split()[1]: s.end for s in spans if s.name.startswith("backward")}
        sent = [s for s in spans if s.lane == "exchange"]
        record.tasks = {i: [s.start, s.end] for i, s in enumerate(sent)}
        self._window.append((record, seconds))
        self.steps += 1
        if len(self._window) == self.schedule.every:
            self._look()

    def _look(self) -> None:
        nbytes = [task.nbytes for task in self.tasks]
        sizes = (mean_nbytes(nbytes),)
        layout = MeasurementLayout(tuple(x.name for x in self.layers), sizes, self.schedule.every)
        records = [record for record, _ in self._window]
        taken = sorted(seconds for _, seconds in self._window)[len(self._window) // 2]
        planned = self.choice.look(layout.seen(layout.numbers(records, nbytes, taken)))
        self._window.clear()
        if planned is not None:
            self.decided.append((self.steps, planned))
            self.tasks = self.plan(planned)

    def plan(self, planned: ScheduleChoice) -> tuple[Task, ...]:
        """The messages of a decision."""
        layers = [planned.layers[layer.name] for layer in self.layers]
        return planned.schedule.plan(layers, planned.link.cost)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("late", range(5))
@pytest.mark.parametrize("slower", [10, 0.1])
def test_a_link_ten_times_as_slow_or_fast_is_noticed_within_20_steps(
    model: str, late: int, slower: float
) -> None:
    before = Link(1e-4, 1e-9 if slower > 1 else 1e-8)
    training = Training(MODELS[model], before)
    for _ in range(SETTLED + late):  # cut at any moment between two looks
        training.step()
    known, at = len(training.decided), training.steps
    training.link = Link(before.alpha, before.beta * slower)
    while training.steps < at + 20:
        training.step()
    steps, planned = training.decided[known]
    assert steps - at <= 20
    assert planned.why.startswith("messages take")
    large = max(MODELS[model])
    assert planned.link.cost(large) == pytest.approx(training.link.cost(large), rel=0.25)


def test_the_decision_that_stands_after_a_cut_is_as_good_as_one_made_there() -> None:
    moved = Training(MODELS["one large layer"], Link(1e-4, 1e-9))
    slow = Link(1e-4, 1e-8)
    for step in range(3 * SETTLED):
        if step == SETTLED:
            moved.link = slow
        moved.step()
    born = Training(MODELS["one large layer"], slow)
    for _ in range(SETTLED):
        born.step()
    taken = [schedule_seconds(each.tasks, each.layers, slow.cost).seconds for each in (moved, born)]
    assert taken[0] <= 1.03 * taken[1]


def test_a_link_that_stays_gives_no_further_decision() -> None:
    training = Training(MODELS["equal layers"], Link(1e-4, 1e-9))
    for _ in range(SETTLED):
        training.step()
    known = len(training.decided)
    for _ in range(3 * SETTLED):
        training.step()
    assert len(training.decided) == known
