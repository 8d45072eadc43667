"""What a cut model still owes its user: its whole state, its outputs, its frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.axes.partition import Partition
from shoal.errors import LayoutMismatch, UsageError
from shoal.models import gpt, mlp, resnet
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo

TWICE = [Partition(shard=2, tensor=2), Partition(shard=2, pipe=2), Partition(tensor=2, pipe=2)]
ONCE = [Partition(shard=2), Partition(tensor=2), Partition(pipe=2)]


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return gpt(9, 4, layers=2, heads=2, width=8).double()


def words(size: int = 4) -> Tensor:
    return torch.randint(9, (size, 4), generator=torch.Generator().manual_seed(size))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def placed_on(partition: Partition, model: nn.Module, optimizer: Any = None) -> Any:
    from shoal.runtime import parallel as pt

    return pt.parallelize(model, optimizer, mesh=pt.mesh(partition, dist.get_world_size()))


def equal(here: dict[str, Tensor], there: dict[str, Tensor]) -> bool:
    return list(here) == list(there) and all(torch.equal(here[k], there[k]) for k in here)


def the_whole_state_comes_back(partition: Partition) -> bool:
    from shoal.runtime.parallel import full_state

    wanted = {k: v.clone() for k, v in small().state_dict().items()}
    return equal(full_state(placed_on(partition, small())), wanted)


def a_whole_state_can_be_loaded(partition: Partition) -> bool:
    from shoal.runtime.parallel import full_state, load_full

    placed = placed_on(partition, small())
    load_full(placed, small(seed=1).state_dict())
    return equal(full_state(placed), dict(small(seed=1).state_dict()))


def the_local_parts_are_views(partition: Partition) -> bool:
    from shoal.runtime.parallel import full_state

    placed = placed_on(partition, small())
    for part in placed.local_parameters().values():
        part.fill_(3.0)
    return all(bool((value == 3.0).all()) for value in full_state(placed).values())


def the_state_of_another_model_is_refused(partition: Partition) -> str:
    from shoal.runtime.parallel import load_full

    return refusal(UsageError, load_full, placed_on(partition, small()), {"x": torch.ones(1)})


def every_rank_sees_the_output(partition: Partition) -> bool:
    placed = placed_on(partition, small())
    with torch.no_grad():
        run = placed.pipeline.forward if placed.pipeline else placed.model
        return torch.allclose(run(words(3)), small()(words(3)), atol=1e-12)


def frozen_parameters_stay(partition: Partition) -> bool:
    from shoal.runtime.parallel import full_state

    model = small()
    model.get_submodule("embed").requires_grad_(False)
    model.get_submodule("blocks.1.up").requires_grad_(False)
    names = [n for n, p in model.named_parameters() if not p.requires_grad]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    placed = placed_on(partition, model, optimizer)
    backward(placed, words())
    optimizer.step()
    full, before = full_state(placed), small().state_dict()
    return all(torch.equal(full[n], before[n]) == (n in names) for n in full)


def gradients_add_up(partition: Partition) -> bool:
    from shoal.runtime.parallel import full_state

    model, alone = small(), small()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, alone))
    placed = placed_on(partition, model, ours)
    for part in (words(4), words(4), words(3)):  # the last makes a shape of its own
        backward(placed, part)
        loss_of(alone(part), part).backward()  # type: ignore[no-untyped-call]
    ours.step()
    theirs.step()
    full = full_state(placed)
    return all(torch.allclose(full[n], v, atol=1e-12) for n, v in alone.state_dict().items())


def a_frozen_first_stage_gets_no_gradient(partition: Partition) -> bool:
    model, alone = small(), small()
    for m in (model, alone):
        m.get_submodule("embed").requires_grad_(False)
        m.get_submodule("blocks.0").requires_grad_(False)
    placed = placed_on(partition, model)
    backward(placed, words())
    loss_of(alone(words()), words()).backward()  # type: ignore[no-untyped-call]
    found = placed.local_gradients()
    wanted = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    return (placed.pipeline.index == 0 and not found) or (
        list(found) == list(wanted) and all(torch.allclose(found[n], wanted[n]) for n in wanted)
    )


def odd_counts_and_schedules_are_refused(partition: Partition) -> str:
    from shoal.runtime import parallel as pt

    placed = placed_on(partition, small())
    told = refusal(UsageError, placed.pipeline.forward_backward, [words()], [], loss_of)
    place = partial(pt.parallelize, mesh=placed.mesh, schedule="1f2b")  # type: ignore[arg-type]
    return told + refusal(UsageError, place, small())


def foreach_on_mixed_layouts_is_refused(partition: Partition) -> str:
    model = small()
    return refusal(
        UsageError, placed_on, partition, model, torch.optim.Adam(model.parameters(), foreach=True)
    )


def a_refused_model_is_left_alone(partition: Partition) -> bool:
    model = gpt(9, 4, layers=1, heads=2, width=8)  # heads for two tensor ranks, no two stages
    names = list(model.state_dict())
    told = refusal(UsageError, placed_on, partition, model)
    return "only 1 blocks" in told and list(model.state_dict()) == names and whole(model)


def unequal_micro_batches_of_shards_are_refused(partition: Partition) -> str:
    placed = placed_on(partition, small())
    some = torch.split(words(4), 2 if dist.get_rank() % 2 else 1)
    return refusal(LayoutMismatch, placed.pipeline.forward_backward, some, some, loss_of)


def degrees_that_do_not_multiply_are_refused(partition: Partition) -> str:
    return refusal(UsageError, placed_on, partition, small())


def where_each_rank_sits(partition: Partition) -> Any:
    from shoal.runtime import parallel as pt

    mesh = pt.mesh(partition, dist.get_world_size())
    placed = pt.parallelize(small(), mesh=mesh)
    peers = dist.get_process_group_ranks(placed.replica_group)
    return mesh.mesh_dim_names, pt.data_index(mesh), peers


def autocast_passes_a_pipeline(partition: Partition) -> bool:
    torch.manual_seed(0)
    model = mlp(4, 9, width=8, layers=4)
    x, y = torch.randn(6, 4), torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = loss_of(model(x), y).item()
        placed = placed_on(partition, model)
        micro = placed.pipeline.forward_backward(torch.split(x, 2), torch.split(y, 2), loss_of)
    return bool(abs(micro.item() - wanted) < 1e-2)


def buffers_belong_to_their_stage(partition: Partition) -> bool:
    from shoal.runtime.parallel import full_state

    torch.manual_seed(0)
    placed = placed_on(partition, resnet(1, 3, width=2, stages=2))
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    placed.pipeline.forward_backward(torch.split(x, 2), torch.split(y, 2), F.cross_entropy)
    counts = {k: int(v) for k, v in full_state(placed).items() if "num_batches" in k}
    return len(counts) == 6 and set(counts.values()) == {2}


def backward(placed: Any, tokens: Tensor) -> None:
    if placed.pipeline:
        placed.pipeline.forward_backward(torch.split(tokens, 2), torch.split(tokens, 2), loss_of)
    else:
        loss_of(placed.model(tokens), tokens).backward()  # type: ignore[no-untyped-call]


def refusal(kind: type[Exception], call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except kind as error:
        return str(error)
    return ""


def whole(model: nn.Module) -> bool:
    return tuple(model(words(1)).shape) == (1, 4, 9)


Check = tuple[Callable[[Partition], Any], Partition, Any]  # what, how cut, what is expected

FOUR: list[Check] = [
    *((the_whole_state_comes_back, p, True) for p in TWICE),
    *((a_whole_state_can_be_loaded, p, True) for p in TWICE),
    *((the_local_parts_are_views, p, True) for p in TWICE),
    *((every_rank_sees_the_output, p, True) for p in TWICE),
    (gradients_add_up, Partition(shard=2, pipe=2), True),
    (a_refused_model_is_left_alone, Partition(tensor=2, pipe=2), True),
    (unequal_micro_batches_of_shards_are_refused, Partition(shard=2, pipe=2), "2 to 4 micro"),
    (degrees_that_do_not_multiply_are_refused, Partition(shard=3), "4 workers cannot be cut"),
]
TWO: list[Check] = [
    *((the_whole_state_comes_back, p, True) for p in ONCE),
    *((every_rank_sees_the_output, p, True) for p in ONCE),
    *((frozen_parameters_stay, p, True) for p in ONCE),
    *((gradients_add_up, p, True) for p in ONCE),
    (the_state_of_another_model_is_refused, Partition(shard=2), "state of another model"),
    (foreach_on_mixed_layouts_is_refused, Partition(tensor=2), "cannot use foreach=True"),
    (a_frozen_first_stage_gets_no_gradient, Partition(pipe=2), True),
    (odd_counts_and_schedules_are_refused, Partition(pipe=2), "did you mean 1f1b?"),
    (odd_counts_and_schedules_are_refused, Partition(data=1, pipe=2), "1 micro-batches, 0 targets"),
    (autocast_passes_a_pipeline, Partition(pipe=2), True),
    (buffers_belong_to_their_stage, Partition(pipe=2), True),
]
CHECKS = [(4, *check) for check in FOUR] + [(2, *check) for check in TWO]


PLACES = [(4, where_each_rank_sits, Partition(shard=2)), (4, where_each_rank_sits, ONCE[2])]
ASKED = [check[:3] for check in CHECKS] + PLACES


def run_checks(ranks: int) -> list[Any]:
    dist.init_process_group("gloo")
    return [what(partition) for n, what, partition in ASKED if n == ranks]


@lru_cache
def told(ranks: int) -> dict[tuple[str, Partition], list[Any]]:
    """What every rank said to every check, from one launch."""
    by_rank = run_workers(ranks, run_checks, ranks, seconds=240)
    keys = [(what.__name__, partition) for n, what, partition in ASKED if n == ranks]
    return {key: [said[i] for said in by_rank] for i, key in enumerate(keys)}


@pytest.mark.parametrize(
    ("ranks", "what", "partition", "wanted"),
    CHECKS,
    ids=[f"{what.__name__}-{partition!r}".replace(" ", "") for _, what, partition, _ in CHECKS],
)
def test_on_every_rank(
    ranks: int, what: Callable[[Partition], Any], partition: Partition, wanted: Any
) -> None:
    for said in told(ranks)[what.__name__, partition]:
        assert said is True if wanted is True else wanted in said


def test_tensor_ranks_and_shards_are_neighbours_and_stages_lie_apart() -> None:
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    shards = [(0, 4, [0, 2]), (1, 4, [1, 3]), (2, 4, [0, 2]), (3, 4, [1, 3])]
    pipes = [(0, 2, [0, 1]), (1, 2, [0, 1]), (0, 2, [2, 3]), (1, 2, [2, 3])]
    for partition, wanted in ((Partition(shard=2), shards), (Partition(pipe=2), pipes)):
        said = told(4)[where_each_rank_sits.__name__, partition]
        assert said == [(names, at[:2], at[2]) for at in wanted]
