"""A decoder-only transformer with tensor and pipeline parallelism.

``forward`` is a chain (embed, blocks, norm, head), which a pipeline may split between any two.
Attention does not use the number of heads, so a tensor rank can have some of them.

References:
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019: columns, then rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import BadArgument, UsageError


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; if ``tied``, head and token embedding share one matrix."""

    vocab: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            why = f"width {self.width} does not divide by its {self.heads} heads; change either"
            raise BadArgument("GPTConfig", why)


class Embed(nn.Module):
    """Sum of token and position embeddings."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, width)
        time, context = tokens.shape[1], self.positions.num_embeddings
        if time > context:
            raise BadArgument("GPT", f"{time} tokens exceed its context {context}; give fewer")
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

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width), the same out
        batch, time, _ = x.shape
        # q, k and v of a head are adjacent, so a rank's part of the rows is whole heads
        qkv = self.qkv(self.norm1(x)).view(batch, time, -1, 3 * self.head_width).transpose(1, 2)
        q, k, v = qkv.split(self.head_width, dim=-1)  # (batch, heads here, time, head_width)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.dropout(self.out(y.reshape(batch, time, -1)))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.norm2(x))))))


class GPT(nn.Module):
    """Computes logits of the next token at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # layers before a residual sum start smaller, as in GPT-2
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** (adds / 2))
        if config.tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, vocab)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def tensor_plan(self, n: int) -> dict[str, str]:
        """Return Megatron's plan: whole heads and MLP columns on each of ``n`` ranks."""
        if (heads := self.config.heads) % n:
            why = f"the {heads} heads of this GPT do not divide by {n}"
            raise UsageError(f"tensor({n}): because {why}; instead: a degree that divides them")
        named = {"qkv": "column", "out": "row", "up": "column", "down": "row"}
        blocks = {f"blocks.*.{name}": style for name, style in named.items()}
        return {"embed.tokens": "vocab", **blocks, "head": "gathered"}

    def pipe_stages(self, n: int) -> list[list[str]]:
        """Return the stages: blocks divided as evenly as possible, norm and head in the last."""
        if (count := len(self.blocks)) < n:
            why = f"this GPT has {count} blocks, fewer than stages"
            raise UsageError(f"pipe({n}): because {why}; instead: pipe({count}), or more layers")
        chain = ["embed", *(f"blocks.{i}" for i in range(count)), "norm", "head"]
        bounds = [0, *(1 + count * i // n for i in range(1, n)), len(chain)]
        return [chain[bounds[s] : bounds[s + 1]] for s in range(n)]


def gpt(vocab: int, context: int = 64, **sizes: Any) -> GPT:
    """Return a :class:`GPT`; other sizes are the fields of :class:`GPTConfig`."""
    return GPT(GPTConfig(vocab, context, **sizes))
