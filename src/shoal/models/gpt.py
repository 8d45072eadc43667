"""A decoder-only transformer with tensor and pipeline parallelism.

``forward`` applies embed, the blocks, norm and head one after the other, so a pipeline may split it
between any two of them. The code of attention does not use the number of heads, so with tensor
parallelism each rank can have some of the heads.

References:
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019 (column, then row).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import BadArgument, UsageError


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT; if ``tied``, the head and the token embedding share one matrix."""

    vocab: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            why = "the width must be a multiple of the number of heads"
            raise BadArgument(f"GPTConfig(width={self.width}, heads={self.heads})", why)


class Embed(nn.Module):
    """Computes the sum of token and position embeddings."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, width)
        time, context = tokens.shape[1], self.positions.num_embeddings
        if time > context:
            raise BadArgument("GPT", f"{time} tokens are more than its context of {context}")
        return cast(Tensor, self.tokens(tokens) + self.positions.weight[:time])


class Block(nn.Module):
    """Attention and a two-layer MLP, each with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, self.head_width = config.width, config.width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> (batch, time, width)
        batch, time, _ = x.shape
        # q, k and v of one head are adjacent outputs, so a tensor rank's outputs are whole heads
        qkv = self.qkv(self.norm1(x)).view(batch, time, -1, 3 * self.head_width).transpose(1, 2)
        q, k, v = qkv.split(self.head_width, dim=-1)  # (batch, this rank's heads, time, head_width)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.dropout(self.out(y.reshape(batch, time, -1)))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.norm2(x))))))


class GPT(nn.Module):
    """Computes the logits of the next token at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # as in GPT-2, weights before a residual sum start smaller
                before_sum = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** (before_sum / 2))
        if config.tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, vocab)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def tensor_plan(self, n: int) -> dict[str, str]:
        """Return Megatron's plan: each of ``n`` ranks has whole heads and some hidden features."""
        if (heads := self.config.heads) % n:
            why = f"its {heads} heads are not a multiple of {n}; instead: use a divisor of {heads}"
            raise UsageError(f"tensor({n}) cannot split this GPT, because {why}")
        styles = {"qkv": "column", "out": "row", "up": "column", "down": "row"}
        blocks = {f"blocks.*.{name}": style for name, style in styles.items()}
        return {"embed.tokens": "vocab", **blocks, "head": "gathered"}

    def pipe_stages(self, n: int) -> list[list[str]]:
        """Return the submodule names of each stage, with about equal numbers of blocks."""
        if (count := len(self.blocks)) < n:
            why = f"it has only {count} blocks; instead: use at most pipe({count}), or more layers"
            raise UsageError(f"pipe({n}) cannot split this GPT, because {why}")
        chain = ["embed", *(f"blocks.{i}" for i in range(count)), "norm", "head"]
        bounds = [0, *(1 + count * i // n for i in range(1, n)), len(chain)]
        return [chain[bounds[s] : bounds[s + 1]] for s in range(n)]


def gpt(vocab: int, context: int = 64, **sizes: Any) -> GPT:
    """Return a :class:`GPT`; ``sizes`` are further fields of :class:`GPTConfig`."""
    return GPT(GPTConfig(vocab, context, **sizes))
