"""Saved on some workers, loaded on others; and what one worker suffers, all learn."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.checkpoint import Loaded, SaveOptions, State, load, save
from shoal.errors import BadArgument, CheckpointCorrupt, CheckpointError
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo

PLAIN = torch.arange(12.0).reshape(3, 4)
EMBED = torch.arange(70.0).reshape(7, 10)  # 7 rows: never the same for each of 2, 3, 4 workers
SHORT = torch.arange(3.0)  # on 4 workers the last has nothing
WIDE = torch.arange(60.0, dtype=torch.float64).reshape(2, 30)


def group() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.group.WORLD


def mesh_of(workers: int) -> Any:
    """A mesh of the first so many; making one is collective, so all must call this."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", list(range(workers)))


def sharded(value: Tensor, dim: int, mesh: Any) -> Tensor:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(value.clone(), mesh, [Shard(dim)])


def template(mesh: Any, factor: float = 1.0) -> dict[str, Any]:
    embed = sharded(EMBED * factor, 0, mesh)
    return {
        "model": {
            "plain": PLAIN * factor,
            "embed": embed,
            "head": embed,
            "short": sharded(SHORT * factor, 0, mesh),
            "wide": sharded(WIDE * factor, 1, mesh),
        }
    }


def save_on(root: str, together: Any, mesh: Any) -> str:
    rank = together.rank()
    mine = {"residual": torch.full((rank + 2,), float(rank)), "rank": rank}
    shared = template(mesh) | {"lr": 0.1}
    state = State(shared, mine, meta={"loader": {"position": 7}})
    return str(save(root, state, step=5, options=SaveOptions(group=together)))


Found = tuple[list[bool], int, Any, list[Any]]


def load_on(root: str, together: Any, into: dict[str, Any] | None) -> Found:
    loaded = load(root, rank=together.rank(), size=together.size(), group=together, into=into)
    right = [_right(loaded, name, value) for name, value in _expected().items()]
    right.append(loaded.shared["model"]["embed"] is loaded.shared["model"]["head"])
    right.append(loaded.shared["lr"] == 0.1 and loaded.meta == {"loader": {"position": 7}})
    mine = None if loaded.mine is None else loaded.mine["rank"]
    parts = [loaded.parts(old)["residual"].tolist() for old in range(loaded.size)]
    return right, loaded.size, mine, parts


def _save(root: str) -> str:
    together = group()
    return save_on(root, together, mesh_of(together.size()))


def _load_whole(root: str) -> Found:
    return load_on(root, group(), None)


def _matrix(root: str) -> dict[tuple[int, int], Found]:
    """Save on 2, 3 and 4 of four workers, load on 1 to 4 of them."""
    import torch.distributed as dist

    rank = group().rank()
    groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 3, 4)}
    meshes = {n: mesh_of(n) for n in groups}
    found = {}
    for before in (2, 3, 4):
        if rank < before:
            save_on(f"{root}/{before}", groups[before], meshes[before])
        for after in (1, 2, 3, 4):
            dist.barrier()
            if rank < after:
                into = template(meshes[after], 0.0)
                found[before, after] = load_on(f"{root}/{before}", groups[after], into)
    return found


def _expected() -> dict[str, Tensor]:
    return {"plain": PLAIN, "embed": EMBED, "head": EMBED, "short": SHORT, "wide": WIDE}


def _right(loaded: Loaded, name: str, value: Tensor) -> bool:
    found = loaded.shared["model"][name]
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    return torch.equal(whole, value)


def test_state_saved_on_some_workers_loads_on_any_number(tmp_path: Path) -> None:
    for rank, by_case in enumerate(run_workers(4, _matrix, str(tmp_path))):
        assert {after for _, after in by_case} == set(range(rank + 1, 5))
        for (before, after), (right, size, mine, parts) in by_case.items():
            assert all(right), (before, after, rank, right)
            assert (size, parts) == (before, [[float(r)] * (r + 2) for r in range(before)])
            assert mine == (rank if after == before else None)
    once = sum(t.numel() * t.itemsize for t in (PLAIN, EMBED, SHORT, WIDE))
    files = list(tmp_path.glob("4/step-00000005/rank-*.bin"))
    assert len(files) == 4
    assert sum(f.stat().st_size for f in files) == once + 4 * (2 + 3 + 4 + 5)  # each tensor once


def test_without_a_template_every_worker_gets_whole_tensors(tmp_path: Path) -> None:
    assert set(run_workers(2, _save, str(tmp_path))) == {str(tmp_path / "step-00000005")}
    for right, *_ in run_workers(3, _load_whole, str(tmp_path)):
        assert all(right)
    alone = load(tmp_path, rank=0, size=1)
    assert torch.equal(alone.shared["model"]["wide"], WIDE)


def _mesh2d(root: str) -> bool:
    together = group()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    value = distribute_tensor(EMBED.clone(), mesh, [Replicate(), Shard(1)])
    few = sharded(SHORT, 0, mesh_of(2))  # ranks 2 and 3 hold nothing of it
    save(root, State({"w": value, "few": few}), step=1, options=SaveOptions(group=together))
    other = distribute_tensor(torch.zeros_like(EMBED), mesh, [Shard(0), Shard(1)])
    into = {"w": other, "few": sharded(SHORT * 0, 0, mesh_of(2))}
    loaded = load(root, rank=together.rank(), size=4, group=together, into=into)
    whole = load(root, rank=0, size=1).shared["few"]
    part = loaded.shared["few"].to_local()
    right = torch.equal(part, SHORT.chunk(2)[together.rank()] if together.rank() < 2 else part)
    return right and torch.equal(whole, SHORT) and torch.equal(other.full_tensor(), EMBED)


def test_a_replicated_and_sharded_tensor_is_cut_anew(tmp_path: Path) -> None:
    assert all(run_workers(4, _mesh2d, str(tmp_path)))
    written = sum(f.stat().st_size for f in tmp_path.glob("step-*/rank-*.bin"))
    assert written == EMBED.numel() * 4 + SHORT.numel() * 4


def _disk_full_on_rank_1(root: str) -> list[str]:
    together = group()
    mesh = mesh_of(2)
    save_on(root, together, mesh)
    state = State(template(mesh))
    real = os.write

    def full(fd: int, view: Any) -> int:
        if together.rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, view)

    os.write = full
    try:
        save(root, state, step=6, options=SaveOptions(group=together))
    except CheckpointError as error:
        return [type(error).__name__, str(error)]
    finally:
        os.write = real
    return []


def test_a_full_disk_on_one_worker_is_told_to_all(tmp_path: Path) -> None:
    first, second = run_workers(2, _disk_full_on_rank_1, str(tmp_path))
    assert first == second
    assert first[0] == "CheckpointError"
    assert first[1].startswith(f"rank 1: No space left in {tmp_path}: needed ")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000005"]
    assert load(tmp_path, rank=0, size=1).step == 5


DIFFERENCES = {
    "name": "shared/w0 is float32[3, 4] on rank 0, but absent on rank 1",
    "shape": "shared/w is float32[2] on rank 0, but float32[3] on rank 1",
    "dtype": "shared/w is float32[2] on rank 0, but float64[2] on rank 1",
    "scalar": "a number, string or key on rank 1 is not equal to that of rank 0",
    "unsavable": "shared/w: a set cannot be saved",
    "mine": "a DTensor belongs to several workers; put it in shared",
}


def _differ(root: str) -> dict[str, str]:
    together = group()
    rank = together.rank()
    states = {
        "name": State({f"w{rank}": PLAIN}),
        "shape": State({"w": torch.zeros(2 + rank)}),
        "dtype": State({"w": torch.zeros(2, dtype=[torch.float32, torch.float64][rank])}),
        "scalar": State({"w": PLAIN, "lr": 0.1 * (1 + rank)}),
        "unsavable": State({"w": PLAIN if rank == 0 else {1}}),
        "mine": State({}, {"x": sharded(SHORT, 0, mesh_of(2))}),
    }
    told = {}
    for name, state in states.items():
        try:
            save(root, state, step=1, options=SaveOptions(group=together))
        except (CheckpointError, BadArgument) as error:
            told[name] = str(error)
    return told


def test_shared_state_that_differs_is_refused_by_all(tmp_path: Path) -> None:
    for told in run_workers(2, _differ, str(tmp_path)):
        assert told.keys() == DIFFERENCES.keys()
        for name, why in DIFFERENCES.items():
            assert why in told[name]
    assert not list(tmp_path.glob("step-*"))


def _fall_back(root: str) -> tuple[int, str]:
    together = group()
    rank = together.rank()
    loaded = load(root, rank=rank, size=2, group=together)
    try:
        load(Path(root) / "step-00000006", rank=rank, size=2, group=together)
    except CheckpointCorrupt as error:
        return loaded.step, str(error)
    return loaded.step, ""


def test_damage_that_one_worker_sees_makes_all_fall_back_together(tmp_path: Path) -> None:
    for step in (5, 6):
        save(tmp_path, State({"a": PLAIN, "b": PLAIN.clone()}), step=step)
    (file,) = tmp_path.glob("step-00000006/rank-*.bin")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    for step, text in run_workers(2, _fall_back, str(tmp_path)):
        assert step == 5
        assert text.startswith(f"rank 1: {file}: tensor shared/b: its CRC-32 is")


def _leave(root: str) -> str:
    together = group()
    if together.rank() == 1:
        return "left"
    try:
        options = SaveOptions(group=together, timeout_seconds=20)
        save(root, State({"w": PLAIN}), step=1, options=options)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_worker_that_leaves_ends_the_save_of_the_others(tmp_path: Path) -> None:
    first, _ = run_workers(2, _leave, str(tmp_path))
    assert first.startswith("rank 0 of 2 lost the other ranks in phase 'flatten' of a checkpoint")
