"""A plain decoder-only transformer that says how it may be cut.

Pre-norm blocks, learned positions, GELU. ``forward`` is a chain (embed, blocks, norm, head), so a
pipeline cuts it anywhere between two links; attention never names the number of heads, so a tensor
rank can hold some of them.

References:
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019: columns, then rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import BadArgument, UsageError


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; ``tied`` makes head and token embedding one matrix."""

    vocab: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            why = f"width {self.width} is no multiple of heads {self.heads}; choose one that is"
            raise BadArgument("GPTConfig", why)


class Embed(nn.Module):
    """Tokens and positions to vectors."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, width)
        time = tokens.shape[1]
        if time > self.context:
            why = f"{time} tokens exceed the context of {self.context}; shorten them, or raise it"
            raise BadArgument("GPT.forward", why)
        at = torch.arange(time, device=tokens.device)
        return cast(Tensor, self.dropout(self.tokens(tokens) + self.positions(at)))


class Block(nn.Module):
    """Attention, then a two-layer MLP, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width), the same out
        x = x + self.dropout(self.attend(self.norm1(x)))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.norm2(x))))))

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention over the heads that this rank holds: all, unless cut by columns."""
        batch, time, _ = x.shape
        # q, k and v lie side by side within a head, so a share of the rows is whole heads
        qkv = self.qkv(x).view(batch, time, -1, 3 * self.head_width).transpose(1, 2)
        q, k, v = qkv.split(self.head_width, dim=-1)  # (batch, heads here, time, head_width)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.out(y.transpose(1, 2).reshape(batch, time, -1)))


class GPT(nn.Module):
    """Logits of the next token at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # residual branches start small, as in GPT-2
                scale = (2 * config.layers) ** -0.5 if "out" in name or "down" in name else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
        if config.tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, vocab)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def tensor_plan(self, n: int) -> dict[str, str]:
        """Megatron's cut: whole heads and MLP columns on each of ``n`` ranks."""
        if self.config.heads % n:
            raise UsageError(
                f"tensor={n}: because the {self.config.heads} heads of this GPT do not divide by"
                f" {n}; instead: a tensor degree that divides them, or heads={n * 2}"
            )
        block = {"qkv": "column", "out": "row", "up": "column", "down": "row"}
        named = {f"blocks.*.{name}": style for name, style in block.items()}
        return {"embed.tokens": "vocab", **named, "head": "gathered"}

    def pipe_stages(self, n: int) -> list[list[str]]:
        """Blocks dealt evenly, the earlier stages taking one more; norm and head at the end."""
        count = len(self.blocks)
        if count < n:
            raise UsageError(
                f"pipe={n}: because this GPT has {count} blocks, fewer than stages; instead:"
                f" pipe={count} or less, or layers={n}"
            )
        bounds = [count * i // n for i in range(n + 1)]
        stages = [[f"blocks.{i}" for i in range(bounds[s], bounds[s + 1])] for s in range(n)]
        return [["embed", *stages[0]], *stages[1:-1], [*stages[-1], "norm", "head"]]


def gpt(vocab: int, context: int = 64, **sizes: Any) -> GPT:
    """A :class:`GPT`; the other sizes are the fields of :class:`GPTConfig`."""
    return GPT(GPTConfig(vocab, context, **sizes))
