"""A model cut over ranks trains like the whole model on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.axes.partition import Partition
from shoal.models import gpt, mlp
from shoal.testing.processes import run_workers

if TYPE_CHECKING:
    from shoal.runtime.parallel import ParallelModel

pytestmark = pytest.mark.gloo

TIME, VOCAB, STEPS = 6, 33, 3

Run = tuple[list[tuple[float, float]], dict[str, Tensor]]  # losses and norms; the end state


class Case(NamedTuple):
    """One way to cut one model."""

    ranks: int
    partition: Partition
    model: str = "gpt"
    kind: str = "sgd"
    clip: float = 1e9  # never reached
    size: int = 12  # samples in a batch
    schedule: Any = "1f1b"

    def __str__(self) -> str:
        usual = Case(self.ranks, self.partition)
        changed = [str(v) for v, u in zip(self, usual, strict=True) if v != u]
        return "-".join([str(self.ranks), repr(self.partition).replace(" ", ""), *changed])


ONE_WAY = [Partition(shard=2), Partition(tensor=2), Partition(pipe=2)]
CASES = [
    *(Case(2, p, kind="adam") for p in ONE_WAY),
    *(Case(2, p, model="mlp", clip=0.3) for p in ONE_WAY),
    Case(2, Partition(shard=2), model="tied", kind="adam"),
    Case(2, Partition(tensor=2), model="tied", kind="adam"),
    Case(2, Partition(pipe=2), size=7, clip=0.3),
    Case(2, Partition(pipe=2), size=7, schedule="gpipe"),
    Case(2, Partition(data=2), size=7, clip=0.3),
    Case(3, Partition(shard=3), kind="adam"),
    Case(3, Partition(shard=3), size=7, clip=0.3),
    Case(3, Partition(pipe=3)),
    *(Case(4, p, kind=kind) for p in ONE_WAY for kind in ("sgd", "adam")),
    Case(4, Partition(shard=2, tensor=2), kind="adam", clip=0.3),
    Case(4, Partition(tensor=2, pipe=2), kind="adam", clip=0.3),
    Case(4, Partition(shard=2, pipe=2), size=7, clip=0.3),
    Case(4, Partition(data=2, pipe=2), size=7, clip=0.3),
]


def language_model(tied: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return gpt(VOCAB, TIME, layers=3, heads=4, width=32, tied=tied).double()


def perceptron() -> nn.Module:
    torch.manual_seed(1)
    return mlp(TIME, VOCAB, width=10, layers=5).double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": language_model,
    "tied": lambda: language_model(tied=True),
    "mlp": perceptron,
}


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def batches(model: nn.Module, size: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(2)
    words = torch.randint(VOCAB, (STEPS, size, TIME + 1), generator=g)
    if isinstance(model, nn.Sequential):
        return [(w[:, :TIME].double(), w[:, -1]) for w in words]
    return [(w[:, :-1], w[:, 1:]) for w in words]


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Two groups with options of their own, as users have them."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.1}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    return torch.optim.Adam(groups, lr=0.01)


def whole_run(case: Case) -> Run:
    """One process, the whole batch: losses, norms and the parameters at the end."""
    model = MODELS[case.model]()
    optimizer = optimizer_of(model, case.kind)
    told = []
    for tokens, target in batches(model, case.size):
        optimizer.zero_grad()
        loss = loss_of(model(tokens), target)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        told.append((loss.item(), norm.item()))
    return told, {k: v.detach() for k, v in model.state_dict().items()}


def cut_run(case: Case) -> Run:
    """The same on the ranks of a mesh, with a plain mean between replicas."""
    from shoal.runtime import parallel as pt

    mesh = pt.mesh(case.partition, dist.get_world_size())
    model = MODELS[case.model]()
    optimizer = optimizer_of(model, case.kind)
    given = batches(model, case.size)
    placed = pt.parallelize(model, optimizer, mesh=mesh, schedule=case.schedule)
    index, count = pt.data_index(mesh)
    told = []
    for tokens, target in given:
        optimizer.zero_grad()
        mine, wanted = tokens.tensor_split(count)[index], target.tensor_split(count)[index]
        loss = one_step(placed, mine, wanted, scale=len(mine) / len(tokens) * count)
        exchange(placed)
        norm = pt.global_norm(placed)
        pt.clip(placed, case.clip, norm=norm.item())
        optimizer.step()
        mean = torch.tensor(loss / count, dtype=torch.float64)
        for axis in ("dp_replicate", "dp_shard"):
            dist.all_reduce(mean, group=mesh[axis].get_group())
        told.append((mean.item(), norm.item()))
    return told, pt.full_state(placed)


def exchange(placed: ParallelModel) -> None:
    """A plain mean over the replicas, of all gradients in one message."""
    grads = list(placed.local_gradients().values())
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=placed.replica_group)
    flat /= dist.get_world_size(placed.replica_group)
    for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def cut_runs(cases: list[Case]) -> list[Run]:
    dist.init_process_group("gloo")
    return [cut_run(case) for case in cases]


def one_step(placed: ParallelModel, tokens: Tensor, target: Tensor, scale: float) -> float:
    if placed.pipeline is None:
        loss = loss_of(placed.model(tokens), target) * scale
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()
    micro, wanted = torch.split(tokens, 2), torch.split(target, 2)  # the last may be smaller
    weights = [len(m) / len(tokens) * scale for m in micro]
    return placed.pipeline.forward_backward(micro, wanted, loss_of, weights=weights).item()


@lru_cache
def outcomes(ranks: int) -> dict[Case, list[Run]]:
    """Every case of so many ranks, in one launch: starting processes costs more than training."""
    cases = [case for case in CASES if case.ranks == ranks]
    by_rank = run_workers(ranks, cut_runs, cases, seconds=240)
    return {case: [runs[i] for runs in by_rank] for i, case in enumerate(cases)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cut_model_trains_as_the_whole_one_on_the_whole_batch(case: Case) -> None:
    told, parameters = whole_run(case)
    for cut_told, cut_parameters in outcomes(case.ranks)[case]:
        torch.testing.assert_close(cut_told, told, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(cut_parameters, parameters, rtol=1e-9, atol=1e-9)
