"""The small models compute what they say and declare cuts that are whole."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.models import GPT, GPTConfig, gpt, mlp, resnet


def small(**sizes: object) -> GPT:
    torch.manual_seed(0)
    return gpt(11, 8, **{"layers": 3, "heads": 4, "width": 16, **sizes}).double()


def tokens(batch: int = 2, time: int = 8) -> Tensor:
    return torch.randint(11, (batch, time), generator=torch.Generator().manual_seed(0))


def test_a_gpt_gives_logits_for_every_position() -> None:
    assert small()(tokens(3, 5)).shape == (3, 5, 11)


def test_a_gpt_never_looks_ahead() -> None:
    model, words = small(), tokens()
    changed = words.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(words), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_a_gpt_learns_a_sequence_by_heart() -> None:
    model, words = small(), tokens(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[0, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 0.1


def test_a_tied_head_is_the_token_embedding() -> None:
    model = small(tied=True)
    assert model.head.weight is model.embed.tokens.weight
    assert len(list(small().parameters())) == len(list(model.parameters())) + 1


def test_dropout_acts_only_while_training() -> None:
    model = GPT(GPTConfig(11, 8, 1, 2, 8, dropout=0.5))
    model.eval()
    torch.testing.assert_close(model(tokens()), model(tokens()))
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_stages_of_a_gpt_are_its_forward(n: int) -> None:
    model = small()
    stages = model.pipe_stages(n)
    assert len(stages) == n
    x = tokens()
    for link in chain.from_iterable(stages):
        x = model.get_submodule(link)(x)
    torch.testing.assert_close(x, model(tokens()))
    counts = [sum(link.startswith("blocks") for link in stage) for stage in stages]
    assert max(counts) - min(counts) <= 1


def test_a_gpt_says_why_it_cannot_be_cut() -> None:
    with pytest.raises(UsageError, match=r"pipe\(4\).*3 blocks.*instead: use at most pipe\(3\)"):
        small().pipe_stages(4)
    with pytest.raises(UsageError, match=r"tensor\(3\).*4 heads.*instead"):
        small().tensor_plan(3)
    with pytest.raises(UsageError, match=r"width=10, heads=4\): the width must be"):
        GPTConfig(11, width=10)
    with pytest.raises(UsageError, match="9 tokens are more than its context"):
        small()(tokens(1, 9))


def test_an_mlp_alternates_columns_and_rows_and_ends_whole() -> None:
    assert list(mlp(4, 2, layers=2).tensor_plan(2).values()) == ["column", "row"]
    assert list(mlp(4, 2, layers=3).tensor_plan(2).values()) == ["column", "row", "gathered"]
    assert mlp(12, 5)(torch.zeros(7, 3, 4)).shape == (7, 5)


def test_an_mlp_needs_two_widths() -> None:
    with pytest.raises(UsageError, match="two or more"):
        mlp(4, 0)


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32)])
def test_a_resnet_takes_images_of_many_sizes(channels: int, size: int) -> None:
    model = resnet(channels, 7, width=4, depth=2)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 15


def test_the_models_load_none_of_what_cuts_them() -> None:
    script = (
        "import torch, sys; b = {*sys.modules}; import shoal.models; print(*{*sys.modules} - b)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    heavy = ("torch.distributed.", "shoal.runtime.parallel", "transformers", "sklearn", "rich")
    assert not [name for name in told.stdout.decode().split() if name.startswith(heavy)]
