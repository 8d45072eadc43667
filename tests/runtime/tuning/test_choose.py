"""Plans that change while training, played in virtual time: no process, no sleep."""

from __future__ import annotations

import pytest

from shoal.analysis.links import Link
from shoal.axes.scheduling import Layer, Schedule, adaptive, magnitude, merged
from shoal.runtime.tuning.choose import (
    ScheduleChoice,
    ScheduleTuner,
    best,
    finalists,
    link_of,
    ratio,
    summary,
    unlike,
)
from shoal.runtime.tuning.measure import MeasurementLayout, Measurements, StepRecord, mean_nbytes
from shoal.simulate.schedule import schedule_seconds
from shoal.tuner import TunerState

MB = 2**20
LAYERS = [Layer(f"l{i}", n, 1e-3, 2e-3) for i, n in enumerate((MB, *(2**12,) * 8, 16 * MB, 2**12))]
FAST = Link(1e-4, 1e-10)


class Played:
    """Training whose steps are played by the simulator, on a link that may change."""

    def __init__(self, schedule: Schedule, link: Link = FAST) -> None:
        self.link, self.every = link, schedule.every
        self.choice = ScheduleTuner(schedule, [Layer(layer.name, layer.nbytes) for layer in LAYERS])
        self.tasks = schedule.plan(LAYERS, link.cost)
        self.steps, self.chosen = 0, list[tuple[int, ScheduleChoice]]()

    def window(self) -> None:
        """Some steps, and a look at them."""
        seconds, spans = schedule_seconds(self.tasks, LAYERS, self.link.cost)
        record = StepRecord(0.0)
        record.arrivals = {s.name.split()[1]: s.end for s in spans if s.name.startswith("backward")}
        sent = [s for s in spans if s.lane == "exchange"]
        record.tasks = {i: [s.start, s.end] for i, s in enumerate(sent)}
        nbytes = [task.nbytes for task in self.tasks]
        sizes = (mean_nbytes(nbytes),)
        layout = MeasurementLayout(tuple(layer.name for layer in LAYERS), sizes, self.every)
        numbers = layout.numbers([record] * self.every, nbytes, seconds)
        planned = self.choice.look(layout.seen(numbers))
        self.steps += self.every
        if planned is not None:
            self.chosen.append((self.steps, planned))
            layers = [planned.layers[layer.name] for layer in LAYERS]
            self.tasks = planned.schedule.plan(layers, planned.link.cost)

    def settle(self) -> None:
        for _ in range(11):
            self.window()


def test_the_link_is_found_from_the_messages_of_steps() -> None:
    played = Played(merged(), Link(3e-4, 2e-9))
    played.settle()
    assert played.choice.link is not None
    assert played.choice.link.cost(MB) == pytest.approx(Link(3e-4, 2e-9).cost(MB), rel=0.1)
    taken = {layer.name: layer.backward for layer in played.choice.layers}
    assert taken == pytest.approx({layer.name: layer.backward for layer in LAYERS})


def test_it_measures_tries_keeps_and_then_leaves_well_alone() -> None:
    played = Played(adaptive())
    played.settle()
    whys = [planned.why for _, planned in played.chosen]
    assert whys[1].startswith("the link is measured; a message takes")
    assert whys[-1].startswith("best of")
    changes = len(played.chosen)
    played.settle()
    assert len(played.chosen) == changes


def test_it_decides_again_within_20_steps_when_the_rate_falls_to_a_tenth() -> None:
    played = Played(adaptive(), Link(1e-4, 1e-9))
    played.settle()
    before, at = len(played.chosen), played.steps
    played.link = Link(1e-4, 1e-8)
    for _ in range(4):
        played.window()
    steps, planned = played.chosen[before]
    assert steps - at <= 20
    assert planned.why.startswith("messages take")
    assert planned.link.cost(16 * MB) == pytest.approx(Link(1e-4, 1e-8).cost(16 * MB), rel=0.2)


def test_one_slow_spell_changes_nothing() -> None:
    played = Played(adaptive(), Link(1e-4, 1e-9))
    played.settle()
    before = len(played.chosen)
    for beta in (1e-8, 1e-9, 1e-8, 1e-9):
        played.link = Link(1e-4, beta)
        played.window()
    assert len(played.chosen) == before


@pytest.mark.parametrize("link", [Link(2e-2, 1e-9), Link(5e-3, 1e-8), Link(1e-4, 1e-9)])
@pytest.mark.parametrize("schedule", [merged(), adaptive()])
def test_messages_of_another_size_are_measured_so_that_startup_and_rate_are_told_apart(
    schedule: Schedule, link: Link
) -> None:
    played = Played(schedule, link)
    played.settle()
    _, survey = played.chosen[0]
    assert survey.why == "run to measure messages of another size"
    _, decision = played.chosen[1]
    assert decision.link.alpha == pytest.approx(link.alpha, rel=0.1)
    assert decision.link.beta == pytest.approx(link.beta, rel=0.1)


def test_a_survey_differs_much_from_what_was_seen_or_is_left_out() -> None:
    even = [Layer(str(i), MB) for i in range(8)]
    assert repr(unlike(8 * MB, even)) == "wfbp(1)"
    assert repr(unlike(4 * MB, even)) == "wfbp(1)"
    assert repr(unlike(MB, even)) == "fused(8MB)"
    assert unlike(MB, even[:1]) is None


def test_what_it_keeps_is_the_fastest_it_tried() -> None:
    played = Played(adaptive(), Link(1e-5, 5e-9))
    played.settle()
    kept = schedule_seconds(played.tasks, LAYERS, played.link.cost).seconds
    for _, planned in played.chosen:
        layers = [planned.layers[layer.name] for layer in LAYERS]
        tasks = planned.schedule.plan(layers, planned.link.cost)
        tried = schedule_seconds(tasks, LAYERS, played.link.cost).seconds
        assert kept <= tried / 0.98 * 1.0001


def trials(*steps: float | tuple[float, ...]) -> TunerState:
    rows = ((s,) if isinstance(s, float) else s for s in steps)
    return TunerState(tuple(tuple((seconds,) for seconds in row) for row in rows))


def test_the_first_is_kept_unless_another_is_clearly_faster() -> None:
    assert best(trials(1.0, 0.99, 1.2)) == 0
    assert best(trials(1.0, 0.97, 0.96)) == 2


def test_both_trials_count_and_neither_alone() -> None:
    assert best(trials((1.0, 1.3), (1.05, 1.05), (1.02, 1.2))) == 1


def test_who_was_tried_once_is_not_held_against_those_tried_again_under_other_load() -> None:
    assert best(trials((1.0, 1.1), (1.01, 1.1), (1.02, 1.1), 1.03)) == 0
    assert best(trials(1.15, (1.02, 1.32), (1.0, 1.3))) == 2


def test_who_comes_close_to_the_fastest_is_tried_again_but_not_all() -> None:
    assert finalists(trials(1.08, 1.5, 1.0, 1.04, 1.09)) == [2, 3, 0]
    assert finalists(trials(1.0, 1.2)) == []


def test_two_that_seem_close_are_told_apart_by_what_they_took_both_times() -> None:
    choice = ScheduleTuner(adaptive(), LAYERS)
    played = Played(adaptive(), Link(1e-4, 1e-9))
    played.choice = choice
    while not (played.chosen and played.chosen[-1][1].why.startswith("run again")):
        played.window()
        assert played.steps < 60
    again = choice._state.at
    layers = dict.fromkeys((layer.name for layer in LAYERS), 1e-3)
    while choice._state.trying:  # the one that seemed the fastest is now ten times slower
        step = 10.0 if choice._state.at == again else 1e-3
        planned = choice.look(Measurements(layers, {MB: 1e-3}, step, {}))
    assert planned is not None
    assert planned.schedule != choice._contenders[again]


def test_steps_in_which_nothing_was_seen_change_nothing() -> None:
    choice = ScheduleTuner(adaptive(), LAYERS)
    assert choice.look(Measurements({}, {}, 1.0, {})) is None


def test_changes_go_into_the_layers_of_a_schedule_that_asks_for_them() -> None:
    planned = ScheduleTuner(magnitude(), LAYERS).look(Measurements({}, {}, 1.0, {"l3": 0.5}))
    assert planned is not None
    assert planned.layers["l3"].change == 0.5
    assert planned.layers["l0"].change == 0


def test_one_size_of_message_tells_the_rate_and_keeps_the_startup() -> None:
    assert link_of({1000: 1.1}, Link(0.1, 1.0)) == Link(0.1, pytest.approx(1e-3))
    assert link_of({1000: 1e-4}, None).alpha == pytest.approx(5e-5)


def test_only_sizes_seen_twice_are_compared() -> None:
    assert ratio({1: 1.0, 2: 5.0}, {2: 10.0, 3: 1.0}) == 2.0
    assert ratio({1: 1.0}, {2: 1.0}) == 1.0


def test_a_plan_is_summed_up_in_words() -> None:
    keys = [("a", "b"), ("c[0:8]",), ("c[8:16]",), ("d",)]
    assert summary(keys) == "2 tensors fused into 1 message, 1 cut into 2, 1 alone"
