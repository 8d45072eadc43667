"""What is saved comes back: values, dtypes, strides, ties, nesting."""

from __future__ import annotations

import logging
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_forms import small
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal import checkpoint
from shoal.checkpoint import SaveOptions, State, load, match, newest, save
from shoal.checkpoint.dcp.read import _empty
from shoal.checkpoint.files.manifest import Chunk, TensorEntry
from shoal.checkpoint.files.raw import DTYPES, dense, is_dense
from shoal.checkpoint.tree import flatten, unflatten
from shoal.errors import BadArgument, CheckpointError, CheckpointMismatch, CheckpointMissing


def back(root: Path, value: Any) -> Any:
    """``value`` after a save and a load."""
    save(root, State({"it": value}), step=1)
    return load(root, rank=0, size=1).shared["it"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bytes(memoryview_of(a)) == bytes(memoryview_of(b))


def memoryview_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"complex32"}))  # torch itself warns of it
def test_every_dtype_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    raw = torch.arange(64, dtype=torch.uint8) % (2 if name == "bool" else 251)
    value = raw.view(DTYPES[name]).reshape(2, -1)
    assert same_bits(back(tmp_path, value), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(1, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4).permute(1, 2, 0),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.empty(2, 0, 3),
        torch.randn(3, requires_grad=True),
        nn.Parameter(torch.randn(2, 2)),
        torch.randn(10)[3:7],
    ],
    ids=lambda v: f"{tuple(v.shape)}-{v.stride()}",
)
def test_shape_values_and_strides_are_kept(value: Tensor, tmp_path: Path) -> None:
    found = back(tmp_path, value)
    assert torch.equal(found, value)
    assert found.stride() == value.stride()


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(4, 8)[:, ::2],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
    ],
    ids=["strided", "expanded", "conjugate", "negative"],
)
def test_views_with_gaps_or_overlaps_come_back_dense(value: Tensor, tmp_path: Path) -> None:
    found = back(tmp_path, value)
    assert torch.equal(found, value)
    assert is_dense(found.shape, found.stride())


def test_a_tensor_without_gaps_is_written_without_a_copy() -> None:
    for value in (torch.randn(4, 3), torch.randn(4, 3).t(), torch.randn(9)[2:5]):
        assert dense(value).data_ptr() == value.data_ptr()


def test_tied_weights_are_saved_once_and_restored_tied(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(100, 10))
    shared = {
        "model": {"embed.weight": weight, "head.weight": weight.detach(), "other": weight[:1]}
    }
    path = save(tmp_path, State(shared), step=1)
    model = load(tmp_path, rank=0, size=1).shared["model"]
    assert model["embed.weight"] is model["head.weight"]
    assert torch.equal(model["embed.weight"], weight)
    assert model["other"].data_ptr() != model["embed.weight"].data_ptr()
    assert sum(f.stat().st_size for f in path.glob("*.bin")) == 4 * (1000 + 10)


def test_a_replica_that_shares_memory_with_the_model_is_saved_on_its_own(tmp_path: Path) -> None:
    weight = torch.randn(3)
    save(tmp_path, State({"w": weight}, mine={"w": weight}), step=1)
    loaded = load(tmp_path, rank=0, size=1)
    assert loaded.mine is not None
    assert loaded.mine["w"] is not loaded.shared["w"]


def test_an_optimizer_state_comes_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(back(tmp_path, optimizer.state_dict()))
    before, after = optimizer.state_dict(), other.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(value, after["state"][index][key]) for key, value in state.items())


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nested = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(nested)
def test_any_nesting_of_scalars_comes_back(value: Any) -> None:
    tree, tensors = flatten(value, "x")
    assert tensors == {}
    assert unflatten(tree, lambda name: name) == value


def test_keys_that_would_make_one_name_stay_apart() -> None:
    a, b, c, d = (torch.tensor(i) for i in range(4))
    value = {0: a, "0": b, "x/y": c, "x": {"y": d}, "$tensor": 3}
    tree, tensors = flatten(value, "n")
    assert len(tensors) == 4
    assert unflatten(tree, tensors.__getitem__) == value


def test_not_a_number_and_infinity_survive_json(tmp_path: Path) -> None:
    nan, inf, neg = back(tmp_path, (math.nan, math.inf, -math.inf))
    assert math.isnan(nan)
    assert (inf, neg) == (math.inf, -math.inf)


def _cycle() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"x": {1, 2}}, "set"),
        ({"f": len}, "builtin_function_or_method"),
        ({"c": 1j}, "complex"),
        ({"s": torch.eye(2).to_sparse()}, "layout"),
        ({"m": torch.empty(2, device="meta")}, "meta device"),
        (_cycle(), "contains itself"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=why):
        save(tmp_path, State(value), step=1)
    assert newest(tmp_path) is None


def test_meta_may_not_hold_tensors(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="meta/t: put tensors in shared or mine"):
        save(tmp_path, State({}, meta={"t": torch.ones(1)}), step=1)


def test_the_last_n_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, small(step), step=step, options=SaveOptions(keep=2))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000004", "step-00000005"]


def test_pruning_never_counts_damaged_ones_nor_removes_the_one_just_saved(root: Path) -> None:
    (root / "step-00000020" / "manifest.json").write_text("{}")
    save(root, small(5), step=5, options=SaveOptions(keep=2))
    assert load(root / "step-00000005", rank=0, size=1).step == 5
    assert load(root / "step-00000010", rank=0, size=1).step == 10
    save(root, small(30), step=30, options=SaveOptions(keep=1))
    assert newest(root) == root / "step-00000030"
    assert not (root / "step-00000010").exists()


def test_saving_a_step_again_replaces_it(root: Path) -> None:
    state = State({"w": torch.full((1,), 7.0)})
    path = save(root, state, step=20)
    assert load(root, rank=0, size=1).shared["w"].item() == 7
    assert len(list(path.iterdir())) == 2


def test_leftovers_of_dead_saves_are_swept(root: Path) -> None:
    (root / ".tmp-00000030-0123456789abcdef").mkdir()
    (root / ".tmp-00000030-0123456789abcdef" / "rank-00000-0123456789abcdef.bin").touch()
    torn = root / "step-00000030"
    torn.mkdir()
    (torn / "rank-00000-0123456789abcdef.bin").touch()
    precious = root / "step-00000040"
    precious.mkdir()
    (precious / "notes.txt").touch()
    save(root, small(50), step=50)
    names = {p.name for p in root.iterdir()}
    assert names == {".lock", "step-00000050", "step-00000020", "step-00000010", precious.name}


def test_two_runs_cannot_save_in_one_directory_at_once(root: Path) -> None:
    with (
        checkpoint.files.commit.locked(root),
        pytest.raises(CheckpointError, match="another run is saving there"),
    ):
        save(root, small(30), step=30)
    save(root, small(30), step=30)


def test_a_template_is_filled_in_place(root: Path) -> None:
    w = nn.Parameter(torch.zeros(2, 3).t())
    loaded = load(root, rank=0, size=1, into={"model": {"w": w}})
    assert loaded.shared["model"]["w"] is w
    assert torch.equal(w.detach(), torch.full((3, 2), 20.0))
    assert w.stride() == (1, 3)
    assert torch.equal(loaded.shared["model"]["b"], torch.arange(4.0) + 20)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ({"w": torch.zeros(2, 3)}, r"model/w has shape \(2, 3\) in the model, but \(3, 2\) in"),
        ({"w": torch.zeros(3, 2).double()}, "model/w is torch.float64 in the model, but torch"),
        ({"v": torch.zeros(3, 2)}, "model/v is in the model, but not in"),
    ],
)
def test_a_template_that_differs_is_left_untouched(
    template: dict[str, Tensor], why: str, root: Path
) -> None:
    template = {"b": torch.zeros(4), **template}
    with pytest.raises(CheckpointMismatch, match=why):
        load(root, rank=0, size=1, into={"model": template})
    assert all(not value.any() for value in template.values())


def test_a_template_tied_where_the_checkpoint_is_not_is_refused(tmp_path: Path) -> None:
    save(tmp_path, State({"a": torch.zeros(2), "b": torch.ones(2)}), step=1)
    one = torch.zeros(2)
    with pytest.raises(CheckpointMismatch, match="b and a are tied in the model"):
        load(tmp_path, rank=0, size=1, into={"a": one, "b": one})


def test_a_tied_checkpoint_fills_an_untied_template(tmp_path: Path) -> None:
    one = torch.ones(2)
    save(tmp_path, State({"a": one, "b": one}), step=1)
    found = load(tmp_path, rank=0, size=1, into={"a": torch.zeros(2), "b": torch.zeros(2)}).shared
    assert torch.equal(found["a"], one)
    assert torch.equal(found["b"], one)


def test_match_names_the_first_parameter_that_differs(root: Path) -> None:
    loaded = load(root, rank=0, size=1)
    w, b = torch.zeros(3, 2), torch.zeros(4)
    match({"w": w, "b": b.to("meta")}, loaded)
    for wrong, why in [
        ({"w": w}, "b is in the checkpoint .*, but not in the model"),
        ({"w": w, "b": b, "c": b}, "c is in the model, but not in the checkpoint"),
        ({"w": w.t(), "b": b}, r"w has shape \(2, 3\) in the model, but \(3, 2\) in"),
        ({"w": w, "b": b.half()}, "b is torch.float16 in the model, but .* never cast"),
    ]:
        with pytest.raises(CheckpointMismatch, match=why):
            match(wrong, loaded)
    with pytest.raises(CheckpointMismatch, match="has no 'net'"):
        match({}, loaded, under="net")


def test_parts_of_each_old_worker_can_be_read_on_another_number(root: Path) -> None:
    loaded = load(root, rank=1, size=2)
    assert (loaded.mine, loaded.size) == (None, 1)
    assert loaded.parts(0)["residual"].tolist() == [20.0] * 5
    with pytest.raises(BadArgument, match="1 workers saved"):
        loaded.parts(1)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1)
    np.random.standard_normal()  # both leave a second number in store
    save(tmp_path, State({}, mine={"rng": checkpoint.rng_state()}), step=1)

    def draw() -> list[float]:
        return [
            random.gauss(0, 1),
            np.random.standard_normal(),
            np.random.rand(),
            torch.rand(1).item(),
        ]

    expected = draw()
    draw()
    loaded = load(tmp_path, rank=0, size=1)
    assert loaded.mine is not None
    checkpoint.set_rng_state(loaded.mine["rng"])
    assert draw() == expected


def test_the_newest_is_by_step_and_not_by_clock(root: Path) -> None:
    import os

    future = 4_000_000_000
    os.utime(root / "step-00000010", (future, future))
    os.utime(root / "step-00000010" / "manifest.json", (future, future))
    assert newest(root) == root / "step-00000020"
    assert load(root, rank=0, size=1).step == 20


@pytest.mark.parametrize("step", [-1, 1.5, True, "2", 10**18])
def test_a_step_is_a_whole_number(step: Any, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="step must be a whole number"):
        save(tmp_path, small(1), step=step)


def test_options_and_ranks_out_of_range_are_refused(root: Path) -> None:
    with pytest.raises(BadArgument, match="keep=0"):
        SaveOptions(keep=0)
    with pytest.raises(BadArgument, match="must be positive"):
        SaveOptions(timeout_seconds=math.nan)
    with pytest.raises(BadArgument, match="rank must lie in"):
        load(root, rank=2, size=2)


def test_a_sound_load_logs_nothing(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(root, rank=0, size=1)
    assert caplog.records == []


def test_there_is_no_checkpoint_where_none_was_saved(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent") is None
    with pytest.raises(CheckpointMissing, match="does not exist"):
        load(tmp_path / "absent", rank=0, size=1)
    with pytest.raises(CheckpointMissing, match="has no checkpoint"):
        load(tmp_path, rank=0, size=1)


def test_a_tensor_of_several_chunks_is_read_with_torchs_own_strides() -> None:
    for shape in [(3,), (2, 0, 3), (4, 1, 5)]:
        chunk = Chunk("f", 0, 0, 0, (0,) * len(shape), (1,) * len(shape), (9,) * len(shape))
        empty = _empty(TensorEntry("float32", shape, (chunk, chunk)))
        assert empty.stride() == torch.empty(shape).stride()
