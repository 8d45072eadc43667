"""What a run tells and refuses: samples, resuming, closed runs, several models, evaluation."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

import shoal
from shoal.axes.scheduling import priority
from shoal.errors import NonFinite, UsageError
from shoal.flow import Mean
from shoal.models import gpt
from shoal.runtime.distribute import _comparable
from shoal.runtime.parallel.pipeline import _accumulated
from shoal.runtime.step.buffers import FlatBuffers
from shoal.runtime.step.exchange import typical
from shoal.runtime.step.model import ShardedModel
from shoal.runtime.step.modes.mixing import MixingMode
from shoal.runtime.step.stats import StepReport, StepReports
from shoal.runtime.train import progress
from shoal.testing.processes import run_workers
from shoal.testing.trainer import LockstepTrainer, tiny
from shoal.timeline.record import Recorder
from shoal.wire.null import NullWire
from shoal.wire.wire import TracedWire

VOCAB, LENGTH = 11, 6


def alone(**options: Any) -> shoal.Run:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    return shoal.distribute(
        model, SGD(model.parameters(), lr=0.1), loss=nn.CrossEntropyLoss(), **options
    )


def data(samples: int = 8) -> TensorDataset:
    return TensorDataset(torch.ones(samples, 3), torch.zeros(samples, dtype=torch.int64))


def counted(strategy: str) -> list[int]:
    torch.manual_seed(0)
    model = gpt(VOCAB, LENGTH, layers=2, heads=2, width=16)
    tokens = torch.randint(VOCAB, (8, LENGTH + 1))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    optimizer = SGD(model.parameters(), lr=0.1)
    with shoal.distribute(model, optimizer, loss=loss, strategy=strategy) as run:
        feed = run.loader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 5, epochs=1)
        return [run.step(batch).samples for batch in feed]


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["tensor(2)", "pipe(2)", "shard(2)", "data"])
def test_a_sample_counts_once_however_many_ranks_see_it(strategy: str) -> None:
    assert run_workers(2, counted, strategy) == [[5, 3], [5, 3]]


def test_a_table_counts_what_copies_say_once() -> None:
    word = StepReport(2.0, 4.0, 0.0, 0.0)
    assert StepReports((word, word)).samples == 8
    assert StepReports((word, word), copies=2).samples == 4
    assert StepReports((word, word), copies=2).loss == 0.5


def test_resuming_without_a_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_RESUME", "1")
    with pytest.raises(UsageError, match=r"--resume cannot restore.*no checkpoint directory: name"):
        alone()


def test_resuming_from_an_empty_directory_starts_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("SHOAL_RESUME", "1")
    assert alone(checkpoint=tmp_path).steps == 0


def test_every_piece_of_the_loop_refuses_a_closed_run() -> None:
    run = alone()
    run.close()
    batch = (torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))
    for call in (
        lambda: run.step(batch),
        lambda: list(run.micro(batch)),
        lambda: run.forward(batch),
        lambda: run.backward(torch.zeros((), requires_grad=True)),
        lambda: run.update(),
    ):
        with pytest.raises(UsageError, match="this run is closed"):
            call()


def test_which_model_is_asked_in_the_name_of_the_call_made() -> None:
    g, d = nn.Linear(3, 3), nn.Linear(3, 1)
    run = shoal.distribute({
        "g": (g, SGD(g.parameters(), lr=0.1)),
        "d": (d, SGD(d.parameters(), lr=0.1)),
    })  # fmt: skip
    calls = {
        "step": lambda: run.step(torch.ones(1, 3)),
        "forward": lambda: run.forward(torch.ones(1, 3)),
        "model": lambda: run.model,
        "update": lambda: run.update(),
    }
    for name, call in calls.items():
        with pytest.raises(
            UsageError, match=rf"run\.{name} needs one model, .* g, d: .*update\('g'\)"
        ):
            call()


def test_evaluation_leaves_every_module_as_it_was_also_when_it_fails() -> None:
    run = alone()
    run.model[0].eval()  # frozen by the user

    def broken(output: Any, target: Any) -> float:
        raise RuntimeError("broken")

    run.evaluate(data(), 8)
    with pytest.raises(RuntimeError, match="broken"):
        run.evaluate(data(), 8, metrics={"broken": broken})
    assert [module.training for module in run.model] == [False, True]
    assert run.model.training


class Noisy(Dataset[Any]):
    """A dataset that warns when its length is asked."""

    def __len__(self) -> int:
        warnings.warn("half of the files are missing", stacklevel=2)
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3), torch.tensor(0)


def test_evaluation_hides_no_warning_but_its_own() -> None:
    run = alone()
    with pytest.warns(UserWarning, match="half of the files are missing"):
        run.evaluate(Noisy(), 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.evaluate(data(4), 256)


class Asked:
    """A step that notes who waits for it."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def samples(self) -> int:
        self.asked += 1
        return 1


def test_progress_waits_for_nobody_where_nothing_is_shown() -> None:
    run, step = alone(), Asked()
    with progress(run, run.loader(data(), 4)) as show:
        show(step)  # type: ignore[arg-type]
    assert step.asked == 0


def test_two_types_keep_the_order_that_priority_gave_each() -> None:
    names = [f"p{i}" for i in range(8)]
    kinds = (torch.float32, torch.float64)
    tensors = {n: torch.zeros(300, dtype=kinds[i % 2]) for i, n in enumerate(names)}
    schedule = priority(256)
    bound = FlatBuffers(tensors).bind(schedule, typical)
    for kind in kinds:
        alike = {n: t for n, t in tensors.items() if t.dtype == kind}
        own = [task.keys for task in FlatBuffers(alike).bind(schedule, typical)]
        assert [task.keys for task in bound if task.whole.dtype == kind] == own


def test_pairs_hold_no_buffers_and_other_modes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        "shoal.runtime.step.modes.mode.FlatBuffers",
        lambda *a, **k: made.append(a) or FlatBuffers(*a),
    )
    LockstepTrainer(shoal.parse("gossip, asp"), workers=3, build=tiny)
    assert not made
    LockstepTrainer(shoal.parse("gossip"), workers=3, build=tiny)
    assert made


def test_mixing_ends_its_rounds_as_all_agreements_do() -> None:
    mode = LockstepTrainer(shoal.parse("gossip"), workers=2, build=tiny).workers[0].mode
    assert isinstance(mode, MixingMode)
    mode.opening()
    mode.exchange._previous["w"] = 1
    assert list(mode.closing(lambda: None)) == []
    assert (mode.exchange.round, mode.exchange._previous) == (1, {})


def test_a_span_is_noted_once_whoever_comes_first() -> None:
    recorder = Recorder(0)
    pending = TracedWire(NullWire(), recorder).ask(Mean(torch.ones(2)))
    threads = [threading.Thread(target=pending.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.timeline().spans) == 1


def test_gradients_come_back_when_a_pass_fails() -> None:
    layer = nn.Linear(2, 1)
    layer.weight.grad = torch.ones(1, 2)
    with pytest.raises(RuntimeError, match="shape"), _accumulated(layer):
        layer(torch.ones(3, 5))
    assert layer.weight.grad.tolist() == [[1, 1]]
    with _accumulated(layer):
        layer.weight.grad = torch.ones(1, 2)
    assert layer.weight.grad.tolist() == [[2, 2]]


class Root(nn.Module):
    """Its loss is 0 and its gradient infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w.sqrt() * x).sum()


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "stepped"),  # the loss alone is checked
        ({"clip": 1.0}, "stopped"),
        ({"nonfinite": "skip"}, "skipped"),
        ({"nonfinite": "skip", "clip": 1.0}, "skipped"),
    ],
)
def test_where_gradients_are_checked_is_as_the_settings_say(
    options: dict[str, Any], end: str
) -> None:
    model = Root()
    run = shoal.distribute(model, SGD(model.parameters(), lr=0.1), **options)
    try:
        found = "skipped" if run.step((torch.ones(1),)).skipped else "stepped"
    except NonFinite as error:
        found = "stopped" if "the gradient" in str(error) else str(error)
    assert found == end
    assert bool(torch.isfinite(model.w).all()) == (end != "stepped")


def test_a_norm_that_is_known_is_not_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        "shoal.runtime.parallel.clip", lambda placed, limit, *, norm=None: told.append(norm)
    )
    source = ShardedModel.__new__(ShardedModel)
    source.parallel = None  # type: ignore[assignment]
    source.clip(1.0, 3.5)
    assert told == [3.5]


def test_settings_that_are_objects_read_alike_on_every_rank() -> None:
    assert _comparable(object()) == _comparable(object())
    assert _comparable((0.9, 0.999)) == "(0.9, 0.999)"


def test_an_empty_strategy_of_the_command_line_is_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool] = []
    monkeypatch.setenv("SHOAL_STRATEGY", "")
    announce = "shoal.runtime.distribute._announce"
    monkeypatch.setattr(announce, lambda run, *, auto: told.append(auto))
    alone()
    assert told == [True]
