"""PyTorch's own ways to train give the same numbers on shoal as on gloo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.testing.processes import run_workers
from shoal.wire.shm import register

pytestmark = pytest.mark.gloo

Numbers = list[float]
STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(8, 16, generator=source), torch.randint(4, (8,), generator=source)


def train(net: nn.Module, data: Callable[[int], tuple[Tensor, Tensor]] = batch) -> Numbers:
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.01), []
    for step in range(STEPS):
        x, y = data(step)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp() -> Numbers:
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        net = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    losses = train(net)
    return losses + [p.sum().item() for p in net.parameters()]


def ddp_unused_and_static() -> Numbers:
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        net = DistributedDataParallel(model(), static_graph=True, gradient_as_bucket_view=True)
    return train(net)


def fsdp2() -> Numbers:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    losses = train(net)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    return [*losses, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)]


def dtensor() -> Numbers:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def same(step: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(step)
        return torch.randn(8, 16, generator=source), torch.randint(4, (8,), generator=source)

    return train(net, same)


def mesh() -> Numbers:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    x = torch.arange(64.0).view(8, 8)
    spread = distribute_tensor(x, grid, [Shard(0), Shard(1)])
    product = (spread @ spread).redistribute(grid, [Replicate(), Shard(0)])
    part = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(part, group=grid.get_group("tensor"))
    return [product.full_tensor().sum().item(), *part.tolist()]


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)]


def pipeline(kind: str, each: int) -> Numbers:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    rank, size = dist.get_rank(), dist.get_world_size()
    parts = stages(size * each)
    mine = [
        PipelineStage(parts[rank + size * i], rank + size * i, size * each, torch.device("cpu"))
        for i in range(each)
    ]
    schedule = getattr(pipelining, kind)(
        mine if each > 1 else mine[0], n_microbatches=4, loss_fn=F.mse_loss
    )
    losses: list[Tensor] = []
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 16, generator=source) for _ in range(2))
    for _ in range(2):
        inputs = (x,) if rank == 0 else ()
        schedule.step(*inputs, target=y if rank == size - 1 else None, losses=losses)
    grads = [p.grad.sum().item() for i in range(each) for p in parts[rank + size * i].parameters()]
    return grads + [loss.item() for loss in losses]


def one_forward_one_backward() -> Numbers:
    return pipeline("Schedule1F1B", 1)


def zero_bubble() -> Numbers:
    return pipeline("ScheduleInterleavedZeroBubble", 2)


def checkpoint(directory: str) -> Numbers:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model())
    train(net)
    path = f"{directory}/{dist.get_backend()}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(get_model_state_dict(net), checkpoint_id=path)
        fresh = fully_shard(model())
        state = get_model_state_dict(fresh)
        dcp.load(state, checkpoint_id=path)
    set_model_state_dict(fresh, state)
    return [p.full_tensor().sum().item() for p in fresh.parameters()]


def on(backend: str, program: Callable[..., Numbers], *args: Any) -> Numbers:
    register()
    dist.init_process_group(backend)
    assert dist.get_backend() == backend
    return program(*args)


def equal(ranks: int, program: Callable[..., Numbers], *args: Any) -> None:
    gloo = run_workers(ranks, on, "gloo", program, *args)
    shoal = run_workers(ranks, on, "shoal", program, *args)
    for expected, found in zip(gloo, shoal, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        (2, ddp),
        (2, ddp_unused_and_static),
        (2, fsdp2),
        (2, dtensor),
        (4, mesh),
        (2, one_forward_one_backward),
        (2, zero_bubble),
    ],
)
def test_a_program_of_torchs_gives_the_same_numbers(
    ranks: int, program: Callable[..., Numbers]
) -> None:
    equal(ranks, program)


def test_a_distributed_checkpoint_is_saved_and_loaded(tmp_path: object) -> None:
    equal(2, checkpoint, str(tmp_path))
