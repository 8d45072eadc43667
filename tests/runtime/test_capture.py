"""Capturing a script: what it would train, without memory, without a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import UsageError
from shoal.runtime.capture import CapturedRun, MetaModules

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

MLP = """
    import torch, shoal
    from torch import nn
    from torch.utils.data import TensorDataset, random_split

    torch.manual_seed(0)
    x = torch.randn(40, 12)
    y = x.argmax(1)
    classes = int(y.max()) + 1                      # real data may be read
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
    if DEVICE:
        model = model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train, test = random_split(TensorDataset(x, y), [32, 8])
    run = shoal.distribute(model, optimizer, loss=nn.functional.cross_entropy, clip=1.0,
                           strategy="ring")
    with run:
        for batch in run.loader(train, 16, epochs=2, processes=2):
            step = run.step(batch)
            raise AssertionError("nothing runs after the first step")
"""


Write = Callable[..., CapturedRun]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a script and captures it."""

    def captured(text: str, *arguments: str) -> CapturedRun:
        script = tmp_path / "script.py"
        script.write_text(dedent(text))
        return shoal.capture(script, arguments)

    return captured


def weightless(captured: CapturedRun) -> bool:
    """Whether nothing of it has memory."""
    models = captured.models.values()
    tensors = [t for m, _ in models for t in (*m.parameters(), *m.buffers())]
    return bool(tensors) and all(t.is_meta for t in tensors)


@pytest.mark.parametrize("device", ["", "cpu", "cuda"])
def test_a_script_yields_model_optimizer_batch_and_strategy(write: Write, device: str) -> None:
    found = write(MLP.replace("DEVICE", repr(device)))
    model, optimizer = found.models["model"]
    assert weightless(found)
    assert model.get_submodule("3").out_features == 12
    assert [tuple(t.shape) for t in found.batch] == [(16, 12), (16,)], "the global batch"
    assert all(t.is_meta for t in found.batch)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert "ring" in repr(found.strategy)
    assert found.settings.clip == 1.0
    assert found.loss is nn.functional.cross_entropy
    loss: torch.Tensor = found.loss(model(found.batch[0]), found.batch[1])
    grads = torch.autograd.grad(loss, list(model.parameters()))
    assert all(grad.is_meta for grad in grads)


def test_a_dict_batch_of_hugging_face_is_captured(write: Write) -> None:
    found = write("""
        import torch, shoal
        from transformers import BertConfig, BertForSequenceClassification
        config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1,
                            num_attention_heads=2, intermediate_size=16)
        model = BertForSequenceClassification(config)
        data = [{"input_ids": torch.arange(7), "labels": i % 2} for i in range(8)]
        run = shoal.distribute(model, torch.optim.AdamW(model.parameters()))
        for batch in run.loader(data, 4):
            run.step(batch)
    """)
    assert weightless(found)
    assert {k: tuple(v.shape) for k, v in found.batch.items()} == {
        "input_ids": (4, 7),
        "labels": (4,),
    }
    assert found.models["model"][0](**found.batch).loss.is_meta


def test_a_model_of_a_hundred_billion_parameters_needs_no_memory(write: Write) -> None:
    found = write("""
        import torch, shoal
        from shoal.models import GPT, GPTConfig
        model = GPT(GPTConfig(vocab=50_000, context=2048, layers=80, heads=80, width=10_240))
        optimizer = torch.optim.Adam(model.parameters())
        run = shoal.distribute(model, optimizer, loss=lambda out, y: out.mean())
        tokens = torch.zeros(4, 8, dtype=torch.int64)
        run.step((tokens, tokens))
    """)
    assert sum(p.numel() for p in found.models["model"][0].parameters()) > 1e11
    assert weightless(found)


def test_two_models_in_a_loop_of_ones_own_are_captured(write: Write) -> None:
    found = write("""
        import torch, shoal
        from torch import nn
        g, d = nn.Linear(2, 3), nn.Linear(3, 1)
        run = shoal.distribute({"g": (g, torch.optim.SGD(g.parameters(), lr=1)),
                                "d": (d, torch.optim.SGD(d.parameters(), lr=1))})
        for x in run.loader(torch.randn(8, 3), 4):
            run.backward(d(g(torch.randn(4, 2))).mean() - d(x).mean())
            run.update("d")
    """)
    assert sorted(found.models) == ["d", "g"]
    assert weightless(found)
    assert tuple(found.batch.shape) == (4, 3)


def test_weights_made_outside_of_a_module_lose_their_weight_too(write: Write) -> None:
    found = write("""
        import torch, shoal
        from torch import nn
        model = nn.Module()
        model.w = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        shoal.distribute(model, optimizer).step(torch.ones(2, 3))
    """)
    model, optimizer = found.models["model"]
    assert weightless(found)
    assert optimizer.param_groups[0]["params"][0] is model.w


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_every_example_is_captured(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert weightless(shoal.capture(script))
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_arguments_reach_the_script_and_nothing_stays_behind(write: Write) -> None:
    argv, path, random_state = sys.argv, list(sys.path), torch.get_rng_state()
    found = write(
        """
        import sys, torch, shoal
        torch.manual_seed(5)
        model = torch.nn.Linear(int(sys.argv[1]), 1)
        shoal.distribute(model, torch.optim.SGD(model.parameters(), lr=1)).step(torch.ones(1, 7))
    """,
        "7",
    )
    assert found.models["model"][0].in_features == 7
    assert (sys.argv, sys.path) == (argv, path)
    assert "SHOAL_MODE" not in os.environ
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "ended without a step"),
        ("import sys; sys.exit(3)", "exited with 3"),
        ("import torch; torch.nn.Linear(1, 1).weight.sum().item()", "reads values of its model"),
    ],
)
def test_a_script_that_cannot_be_captured_is_one_clear_error(
    write: Write, text: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        write(text)


def test_a_script_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UsageError, match="no script"):
        shoal.capture("nowhere.py")


def test_the_scripts_own_errors_are_its_own(write: Write) -> None:
    with pytest.raises(ZeroDivisionError):
        write("1 / 0")


def test_what_meets_a_weightless_tensor_is_weightless() -> None:
    with MetaModules():
        layer = nn.Linear(3, 2)
        out = layer(torch.ones(4, 3)).to("cpu").double()
        data = torch.ones(2).to(torch.float64)
    assert out.is_meta
    assert out.dtype == torch.float64
    assert not data.is_meta
