"""Laws of training, in lockstep: each strategy, against the plainest way to say it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from shoal import rules
from shoal.axes import AXES
from shoal.axes.compression import Trait
from shoal.axes.coordination import spectral_gap
from shoal.runtime.step.exchange import Exchange
from shoal.runtime.step.model import ReplicatedModel
from shoal.runtime.step.modes import ModeSetup
from shoal.runtime.step.modes.local import LocalMode
from shoal.strategy import Strategy, parse
from shoal.testing.contracts.matrix import legal_products, samples_by_axis
from shoal.testing.trainer import Batch, Build, LockstepTrainer, digits, lockstep_context, tiny
from shoal.wire.null import NullWire
from shoal.wire.wire import TracedWire

WORKERS = (1, 2, 3, 4)
each_count = pytest.mark.parametrize("workers", WORKERS)


def adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = tiny()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def still() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Never moves by itself, so that only the exchange is seen."""
    model, _ = tiny()
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def uneven() -> list[Batch]:
    """Batches that no number of workers but one divides, one smaller than four workers."""
    (x, y), (u, v), (s, t) = digits(13, batches=3)
    return [(x, y), (u[:3], v[:3]), (s[:7], t[:7])]


def alone(build: Build, batches: list[Batch], steps: int) -> dict[str, Tensor]:
    """One process, the whole batch, no Shoal."""
    model, optimizer = build()
    for k in range(steps):
        x, y = batches[k % len(batches)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def school(text: str, *, workers: int, build: Build = tiny, steps: int = 0) -> LockstepTrainer:
    made = LockstepTrainer(parse(text), workers=workers, build=build)
    if steps:
        made.train(uneven(), steps=steps)
    return made


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-9) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol)


@functools.cache
def lossless() -> list[Strategy]:
    """Whole replicas that send every step's gradient without loss, the order of messages apart."""
    plain = parse("auto")  # a route changes the order of a sum only, and lockstep runs none
    given = {
        **samples_by_axis(),
        "partition": [plain.partition],
        "collectives": [plain.collectives],
    }
    found = [Strategy(*row) for row in legal_products(given)]
    exactly = [s for s in found if Trait.LOSSLESS in s.compression.traits]
    return [s for s in exactly if rules.sends_gradients(s) and s.synchrony.name == "bsp"]


@pytest.mark.parametrize("build", [tiny, adam])
@each_count
def test_every_lossless_gradient_strategy_equals_one_process(build: Build, workers: int) -> None:
    expected = alone(build, uneven(), steps=4)
    strategies = lossless()
    assert len(strategies) >= len(AXES["scheduling"]) + 1
    for s in strategies:
        made = LockstepTrainer(s, workers=workers, build=build)
        made.train(uneven(), steps=4)
        for worker in range(workers):
            assert_same(made.parameters(worker), expected)


@each_count
def test_topk_of_everything_is_exact(workers: int) -> None:
    assert_same(
        school("topk(1)", workers=workers, steps=4).parameters(), alone(tiny, uneven(), steps=4)
    )


@pytest.mark.parametrize("with_whom", ["all_reduce", "parameter_server"])
@pytest.mark.parametrize("form", ["exact", "error_feedback(topk(0.25))", "powersgd(2)"])
@pytest.mark.parametrize("like_bsp", ["ssp(0)", "local(1)"])
def test_nothing_to_wait_for_equals_bsp(with_whom: str, form: str, like_bsp: str) -> None:
    one, other = (
        school(f"{with_whom}, {sync}, {form}", workers=3, steps=5) for sync in ("bsp", like_bsp)
    )
    assert torch.equal(one.models(), other.models())


@each_count
def test_agreeing_on_changes_every_step_equals_bsp_for_sgd(workers: int) -> None:
    made = school("bsp", workers=workers)
    for i, worker in enumerate(made.workers):
        context = lockstep_context(parse("bsp"), i, workers)
        wire = TracedWire(NullWire(), context.recorder)
        setup = ModeSetup(ReplicatedModel(worker.model), worker.optimizer, wire, context)
        made.workers[i] = worker._replace(mode=LocalMode(setup))
    made.train(uneven(), steps=5)
    assert_same(made.parameters(), alone(tiny, uneven(), steps=5))


@pytest.mark.parametrize("text", ["local(3)", "parameter_server, local(3)"])
@each_count
def test_local_steps_end_in_the_mean_of_what_each_did_alone(text: str, workers: int) -> None:
    batches = digits(12 * workers, batches=3)
    made = LockstepTrainer(parse(text), workers=workers, build=tiny)
    for batch in batches[:2]:
        made.step(batch)
    if workers > 1:
        assert not torch.equal(made.models()[0], made.models()[1])
    made.step(batches[2])
    shares = [_share(batches, workers, i) for i in range(workers)]
    ends = [alone(tiny, share, steps=3) for share in shares]
    mean = {name: torch.stack([end[name] for end in ends]).mean(0) for name in ends[0]}
    for worker in range(workers):
        assert_same(made.parameters(worker), mean)


def _share(batches: list[Batch], workers: int, worker: int) -> list[Batch]:
    return [(x.tensor_split(workers)[worker], y.tensor_split(workers)[worker]) for x, y in batches]


@pytest.mark.parametrize(
    "text",
    [
        "wfbp, error_feedback(topk(0.25))",
        "wfbp, error_feedback(powersgd(1))",
        "priority(256), error_feedback(topk(0.25))",
        "parameter_server, error_feedback(cast(bfloat16))",
    ],
)
def test_error_feedback_loses_nothing_over_a_training_run(text: str) -> None:
    made = school(text, workers=3)
    atol = 1e-3 if "cast" in text else 1e-12  # 16 bits round the sum, not what each sent
    before = made.parameters()
    seen = [_watch(worker.model) for worker in made.workers]
    made.train(uneven(), steps=7)
    for name, start in before.items():
        kept = [_residual(worker.mode.exchange, name, start) for worker in made.workers]
        sent = sum(g[name] - k for g, k in zip(seen, kept, strict=True)) / 3
        torch.testing.assert_close(made.parameters()[name], start - 0.1 * sent, rtol=0, atol=atol)
        assert any(k.any() for k in kept) or start.dim() == 1


def _watch(model: nn.Module) -> dict[str, Tensor]:
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.register_hook(functools.partial(_note, totals[name]))  # type: ignore[no-untyped-call]
    return totals


def _note(total: Tensor, grad: Tensor) -> None:
    total.add_(grad)


def _residual(agreement: Exchange | None, name: str, like: Tensor) -> Tensor:
    assert agreement is not None
    pieces = {k: s[0] for k, s in agreement.states.items() if k.partition("[")[0] == name}
    order = sorted(pieces, key=lambda k: int(k.partition("[")[2].partition(":")[0] or 0))
    return torch.cat([pieces[k].flatten() for k in order]).view_as(like)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_gossip_keeps_the_mean_and_shrinks_disagreement_by_the_spectral_gap(workers: int) -> None:
    made = school("gossip", workers=workers, build=still)
    made.scatter()
    before = made.models()
    made.step(digits(10)[0])
    after = made.models()
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-12)
    gap = spectral_gap(made.strategy.coordination.mixing(workers, 0))
    apart = (before - before.mean(0)).norm(), (after - after.mean(0)).norm()
    assert apart[1] <= (1 - gap) * apart[0] + 1e-12


@pytest.mark.parametrize("workers", [2, 3])
def test_gossip_with_all_neighbours_agrees_in_one_round(workers: int) -> None:
    made = school("gossip", workers=workers, build=still)
    made.scatter()
    mean = made.models().mean(0)
    made.step(digits(10)[0])
    torch.testing.assert_close(made.models(), mean.expand(workers, -1), rtol=0, atol=1e-12)


def test_the_mean_of_gossip_moves_by_the_mean_of_the_gradients() -> None:
    made = school("gossip", workers=4)
    made.scatter()
    before = made.models().mean(0)
    seen = [_watch(worker.model) for worker in made.workers]
    made.step(digits(12)[0])
    steps = torch.stack([torch.cat([g.flatten() for g in s.values()]) for s in seen])
    torch.testing.assert_close(
        made.models().mean(0), before - 0.1 * steps.mean(0), rtol=0, atol=1e-12
    )


def test_gossip_over_a_period_mixes_only_at_its_end() -> None:
    made = school("gossip, local(3)", workers=2, build=still)
    made.scatter()
    before = made.models()
    for _ in range(2):
        made.step(digits(8)[0])
        assert torch.equal(made.models(), before)
    made.step(digits(8)[0])
    torch.testing.assert_close(made.models()[0], made.models()[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_pairs_conserve_the_sum_of_parameters(workers: int) -> None:
    made = school("gossip, asp", workers=workers, build=still)
    made.scatter()
    before = made.models()
    made.train(digits(10), steps=8)
    after = made.models()
    torch.testing.assert_close(after.sum(0), before.sum(0), rtol=0, atol=1e-11)
    assert after.std(0).norm() < 0.2 * before.std(0).norm()


def test_all_workers_start_from_the_first_ones_weights() -> None:
    zeroed = tiny()
    with torch.no_grad():
        next(zeroed[0].parameters()).zero_()
    builds = iter([zeroed])
    made = LockstepTrainer(parse("bsp"), workers=3, build=lambda: next(builds, None) or tiny())
    for worker in range(3):
        assert not made.parameters(worker)["0.weight"].any()
