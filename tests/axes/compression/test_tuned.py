"""tuned: a link and a model force its choice, on a clock of the test's own."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from clocks import Clock
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.axes.compression import (
    Compressor,
    Trait,
    Value,
    cast,
    error_feedback,
    exact,
    powersgd,
    topk,
    tuned,
)
from shoal.axes.compression.kit.stopwatch import Stopwatch
from shoal.axes.compression.tuned import PATIENCE, TRIES, CandidateCost, CompressorTuner
from shoal.axes.scheduling import Schedule, fused, priority, wfbp
from shoal.errors import BadArgument, ConflictError
from shoal.flow import Ask, Flow, nbytes, through
from shoal.runtime.step.buffers import FlatBuffers
from shoal.runtime.step.exchange import Exchange, typical
from shoal.strategy import parse
from shoal.testing.contracts import check
from shoal.testing.contracts.exchange import exchange
from shoal.testing.lockstep import lockstep
from shoal.testing.logs import captured_logs
from shoal.testing.processes import run_workers
from shoal.tuner import TunerState

SLOW, FAST = 1e-6, 1e-12  # seconds a byte
STARTUP = 1e-3
WORK = 1e-9  # seconds a byte that is compressed
EVERY = 6
LONG = 2 * TRIES + 1  # rounds: of two candidates, all are tried


def costly(inner: Compressor, clock: Clock) -> Compressor:
    """The same, and encoding takes time."""

    def flow(value: Value, state: Any, round: int) -> Flow:
        clock.seconds += WORK * value.tensor.nbytes
        return inner.flow(value, state, round)

    return dataclasses.replace(inner, flow=flow)


class Crew:
    """Two workers that agree on a large and a tiny tensor, over a link of the test's own."""

    def __init__(
        self,
        rate: float,
        *,
        most: float = 1e9,
        schedule: Schedule | None = None,
        strong: Compressor | None = None,
    ) -> None:
        self.rate = rate
        self.clocks = [Clock(), Clock()]
        self.chance = torch.Generator().manual_seed(0)
        self.meant = {"large": torch.zeros(2000), "tiny": torch.zeros(2)}
        self.got = {name: torch.zeros_like(t) for name, t in self.meant.items()}
        strong = strong or error_feedback(topk(0.01))
        self.crew = []
        for worker, clock in enumerate(self.clocks):
            form = tuned(exact(), costly(strong, clock), every=EVERY, most=most)
            flats = FlatBuffers({name: t.clone() for name, t in self.meant.items()})
            agreement = Exchange(flats, schedule or wfbp(1), form)
            agreement.stopwatch = Stopwatch(clock, logs=worker == 0)
            self.crew.append(agreement)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self._fill()
            for index in range(len(self.crew[0].buckets)):
                flows = [a.flow(index) for a in self.crew]
                asked = zip(flows, self.clocks, strict=True)
                lockstep([through(flow, self._carry(clock)) for flow, clock in asked])
            self._take()

    def _fill(self) -> None:
        for agreement in self.crew:
            for name, place in agreement.flat.views.items():
                gradient = torch.randn(place.view.shape, generator=self.chance)
                place.view.copy_(gradient)
                self.meant[name] += gradient / len(self.crew)

    def _carry(self, clock: Clock) -> Callable[[Ask], Generator[Ask, Any, Any]]:
        def answer(ask: Ask) -> Generator[Ask, Any, Any]:
            clock.seconds += STARTUP + self.rate * nbytes(ask)
            return (yield ask)

        return answer

    def _take(self) -> None:
        one, two = self.crew
        for name, place in one.flat.views.items():
            assert torch.equal(place.view, two.flat.views[name].view), "workers differ"
            self.got[name] += place.view
        for agreement in self.crew:
            agreement.end_round()

    def chosen(self) -> dict[str, int]:
        notes = [{k: TunerState(*s[2]).chosen for k, s in a.states.items()} for a in self.crew]
        assert notes[0] == notes[1]
        return notes[0]

    def waiting(self, name: str) -> Tensor:
        """The mean of what the workers keep of a tensor."""
        kept = [[s[0] for k, s in a.states.items() if k.startswith(name)] for a in self.crew]
        return sum(torch.cat([p.flatten() for p in mine]) for mine in kept) / len(kept)


def test_a_slow_link_compresses_what_is_large_and_only_that() -> None:
    crew = Crew(SLOW)
    crew.run(LONG)
    assert crew.chosen() == {"large": 1, "tiny": 0}


def test_on_a_fast_link_encoding_does_not_pay() -> None:
    crew = Crew(FAST)
    crew.run(LONG)
    assert crew.chosen() == {"large": 0, "tiny": 0}


@pytest.mark.parametrize(("before", "now", "expected"), [(SLOW, FAST, 0), (FAST, SLOW, 1)])
def test_another_link_another_choice(before: float, now: float, expected: int) -> None:
    crew = Crew(before)
    crew.run(LONG + EVERY)
    assert crew.chosen()["large"] == 1 - expected
    crew.rate = now
    crew.run((PATIENCE if now == FAST else 3) * EVERY + LONG)  # small messages hide a faster link
    assert crew.chosen()["large"] == expected


def test_of_one_bucket_there_is_one_choice() -> None:
    crew = Crew(SLOW, schedule=fused(2**20))
    crew.run(LONG)
    assert crew.chosen() == {"large": 1, "tiny": 1}


def test_nothing_is_lost_when_the_choice_changes() -> None:
    crew = Crew(SLOW)
    for rate in (SLOW, FAST, SLOW):
        crew.rate = rate
        for _ in range(PATIENCE * EVERY + LONG):
            crew.run(1)
            for name, meant in crew.meant.items():
                kept = crew.waiting(name).view_as(meant)
                torch.testing.assert_close(crew.got[name] + kept, meant, rtol=0, atol=1e-4)
    assert crew.waiting("large").any()


@pytest.mark.parametrize("strong", [error_feedback(powersgd(1)), cast(), topk(0.1)], ids=repr)
def test_what_comes_next_sends_what_was_kept(strong: Compressor) -> None:
    made, x = tuned(exact(), strong), [torch.randn(8, 8), torch.randn(8, 8)]
    states: Any = None
    for _ in range(TRIES + 1):
        states = exchange(made, [t.clone() for t in x], states=states).states
    assert states[0][0].any()
    back = [(*s[:2], tuple(TunerState(*s[2])._replace(at=0, trying=False))) for s in states]
    ends = exchange(made, [torch.zeros(8, 8)] * 2, states=back).ends
    kept = (states[0][0] + states[1][0]) / 2
    torch.testing.assert_close(ends[0].mean, kept)
    assert not ends[0].state[0].any()


def test_it_says_what_it_chose_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal")
    crew = Crew(SLOW)
    crew.run(LONG)
    (line,) = caplog.messages
    assert ": large: chose error_feedback(topk(0.01)), before exact: computing + exposed" in line
    assert "exact 0 + 9 ms (0), error_feedback(topk(0.01)) 0.008 + 1.11 ms (1.8)" in line
    crew.rate = FAST
    crew.run(PATIENCE * EVERY + LONG)
    assert ": large: chose exact, before error_feedback(topk(0.01)):" in caplog.messages[1]


def test_a_bucket_speaks_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal")
    Crew(SLOW, schedule=fused(2**20)).run(LONG)
    (line,) = caplog.messages
    assert " and 1 more: chose error_feedback(topk(0.01)), before exact:" in line


def test_who_leaves_too_much_behind_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal")
    crew = Crew(SLOW, most=2.5)
    crew.run(LONG)
    assert crew.chosen()["large"] == 1
    crew.run(3 * EVERY)
    assert crew.chosen()["large"] == 0
    assert len(caplog.messages) == 2
    crew.run(3 * EVERY + LONG)  # the other time that it now takes is looked into, too
    assert crew.chosen()["large"] == 0, "once is enough"


@pytest.mark.parametrize("stop", [2, TRIES + 2, LONG + 2, LONG + EVERY])
def test_resuming_goes_on_as_if_nothing_had_been(stop: int) -> None:
    whole, broken = Crew(SLOW), Crew(SLOW)
    whole.run(3 * EVERY + LONG)
    broken.run(stop)
    for worker, agreement in enumerate(broken.crew):
        clock = broken.clocks[worker] = Clock()
        form = tuned(exact(), costly(error_feedback(topk(0.01)), clock), every=EVERY, most=1e9)
        fresh = Exchange(agreement.flat, agreement.schedule, form)
        fresh.load_state_dict(copy.deepcopy(agreement.state_dict()))
        fresh.stopwatch = Stopwatch(clock)
        broken.crew[worker] = fresh
    broken.run(3 * EVERY + LONG - stop)
    assert broken.chosen() == whole.chosen() == {"large": 1, "tiny": 0}
    for name, got in whole.got.items():
        assert torch.equal(got, broken.got[name])


def test_in_other_buckets_all_is_tried_anew_and_nothing_is_lost() -> None:
    crew = Crew(SLOW, schedule=priority(2000))
    crew.run(LONG + 1)
    before, kept = crew.chosen(), crew.waiting("large")
    assert before["large[0:500]"] == 1
    assert kept.any()
    for agreement in crew.crew:
        assert agreement.rebind(wfbp(1), {}, typical)
    crew.run(1)
    assert TunerState(*crew.crew[0].states["large"][2]).trying
    total = crew.got["large"] + crew.waiting("large")
    torch.testing.assert_close(total, crew.meant["large"], rtol=0, atol=1e-4)
    crew.run(LONG)
    assert crew.chosen() == {"large": 1, "tiny": 0}


def test_where_nobody_measures_the_first_one_stays() -> None:
    crew = Crew(SLOW)
    for agreement in crew.crew:
        agreement.stopwatch = None
    crew.run(LONG + EVERY * 3)
    assert crew.chosen() == {"large": 0, "tiny": 0}


def rules(*, most: float = 1.0) -> CompressorTuner:
    return CompressorTuner(3, every=EVERY, most=most)


@pytest.mark.parametrize(
    ("seconds", "current", "expected"),
    [
        ((3, 2, 1), 0, 2),  # the fastest
        ((1, 0.95, 0.99), 0, 0),  # not clearly faster than what runs
        ((1, 0.95, 0.99), 2, 1),  # a gentler one that is as fast as what runs
        ((3, 1.05, 1), 0, 1),  # a gentler one of those that are clearly faster
        ((0, 0, 0), 2, 0),  # no times were measured
    ],
)
def test_the_fastest_is_taken_and_of_like_ones_the_gentler(
    seconds: tuple[float, ...], current: int, expected: int
) -> None:
    assert rules().pick([CandidateCost(s / 2, s / 2, 0) for s in seconds], current) == expected


def test_a_residual_over_the_bound_rules_out() -> None:
    costs = [CandidateCost(9, 9, 0), CandidateCost(2, 2, 0.5), CandidateCost(1, 1, 1.5)]
    assert rules().pick(costs, 2) == 1
    assert rules(most=2.0).pick(costs, 0) == 2
    assert rules().pick([k._replace(residual=k.residual + 2) for k in costs], 2) == 0


def test_one_odd_look_is_none_two_are_another_link() -> None:
    tuner, costs = rules(), [CandidateCost(1, 4, 0)] * 3
    state = tuner.start()._replace(trying=False, age=EVERY - 1)
    state = tuner.judge(state, costs)
    assert state.usual == 4
    odd = [CandidateCost(1, 9, 0)] * 3
    state = tuner.judge(tuner.judge(state, odd), costs)
    assert not state.odd
    assert not tuner.judge(state, odd).trying
    assert tuner.judge(tuner.judge(state, odd), odd).trying


def test_after_many_quiet_looks_all_are_tried_again_and_later_each_time() -> None:
    tuner, costs = rules(), [CandidateCost(1, 4, 0.5)] * 3
    state = tuner.start()._replace(trying=False, usual=4.0, residuals=(0.0, 0.5, 0.5))
    for patience in (PATIENCE, 2 * PATIENCE, 4 * PATIENCE):
        for _ in range(patience - 1):
            state = tuner.judge(state, costs)
            assert not state.trying
        state = tuner.judge(state, costs)
        assert state.trying
        state = tuner.judge(state, costs)
    assert state.residuals == (0.0, 0.0625, 0.0625), "half forgiven each time"


@pytest.mark.parametrize(
    "text", ["tuned(exact, onebit)", "tuned(twobit(0.1), by_size(64, exact, onebit), most=3.5)"]
)
def test_candidates_that_keep_their_own_residual_keep_the_laws(text: str) -> None:
    made = parse(text).compression
    assert made.name == text
    check(made)


@pytest.mark.parametrize("at", [1, 2])
def test_the_laws_hold_whoever_runs(at: int) -> None:
    made = tuned(exact(), error_feedback(topk(0.25)), cast())

    def init(value: Value) -> tuple[Any, ...]:
        residual, rests, note = made.init(value)
        return residual, rests, tuple(TunerState(*note)._replace(at=at, trying=False))

    check(dataclasses.replace(made, init=init))


@pytest.mark.parametrize(
    ("text", "has", "lacks"),
    [
        ("tuned", Trait.CONSERVING, Trait.SLICEABLE | Trait.SUMS | Trait.ONE_SHOT),
        ("tuned(exact, topk(0.1))", Trait.CONSERVING | Trait.SLICEABLE, Trait.SUMS),
        ("tuned(exact, powersgd(1))", Trait.CONSERVING | Trait.SUMS, Trait.SLICEABLE),
        ("tuned(exact, cast)", Trait.SUMS | Trait.SLICEABLE, Trait.LOSSLESS | Trait.ELEMENTWISE),
    ],
)
def test_it_claims_what_holds_of_all(text: str, has: Trait, lacks: Trait) -> None:
    traits = parse(text).compression.traits
    assert has in traits
    assert not traits & lacks


LEGAL = [
    "fifo, tuned",
    "fused, tuned",
    "merged, tuned",
    "local(4), tuned",
    "parameter_server, tuned",
    "priority, tuned(exact, topk(0.1))",
    "ring, tuned(exact, cast)",
    "momentum_correction(tuned)",
    "after(10, tuned)",
]
ILLEGAL = [
    "priority, tuned",
    "gossip, tuned",
    "parameter_server, asp, tuned",
    "ring, tuned",
    "error_feedback(tuned)",
    "tuned(exact, dgc(0.1))",
    "tuned(exact, gtopk(0.1))",
    "tuned(exact, sign)",
    "tuned(exact, qsgd(4))",
    "tuned(exact, difference(topk(0.1)))",
    "tuned(exact, sufficient_factors)",
]


@pytest.mark.parametrize("text", LEGAL)
def test_it_goes_with_what_its_candidates_go_with(text: str) -> None:
    made = parse(text)
    assert parse(repr(made)) == made


@pytest.mark.parametrize("text", ILLEGAL)
def test_nonsense_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(ConflictError) as found:
        parse(text)
    assert all(c.why and c.instead for c in found.value.conflicts)


@pytest.mark.parametrize(
    "text",
    [
        "tuned(exact)",
        "tuned(exact, 3)",
        "tuned(exact, x)",
        "tuned(every=4)",
        "tuned(every=7.5)",
        "tuned(most=0)",
        "tuned(most=x)",
    ],
)
def test_bad_arguments_are_named(text: str) -> None:
    with pytest.raises(BadArgument, match="tuned"):
        parse(text)


def trained(strategy: str) -> tuple[list[Tensor], list[str]]:
    lines = captured_logs()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 4))
    x = torch.randn(64, 8)
    run = shoal.distribute(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        loss=nn.functional.cross_entropy,
        strategy=strategy,
        backend="gloo",
    )
    with run:
        data = TensorDataset(x, x[:, :4].argmax(1))
        for batch in run.loader(data, 32, epochs=20, shuffle=False):
            run.step(batch)
        run.evaluate(data)  # its collectives come behind those of the last step
    return [p.detach() for p in net.parameters()], [n for n in lines if n.startswith("tuned")]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "strategy",
    [
        "wfbp(2KB), tuned(every=5)",
        "priority(2KB), tuned(exact, topk(0.1), every=5)",
        "local(2), tuned(topk(0.1), exact, every=5)",
    ],
)
def test_processes_stay_alike_whatever_their_clocks_say(strategy: str) -> None:
    (one, _), (two, silent) = run_workers(2, trained, strategy)
    for p, q in zip(one, two, strict=True):
        assert torch.equal(p, q)
        assert p.isfinite().all()
    assert not silent, "only the main rank speaks"
