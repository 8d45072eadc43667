"""Train a small GPT on the characters of Shoal's licence, then let it write.

shoal run examples/char_lm.py -n 2
shoal run examples/char_lm.py -n 2 --strategy "tensor=2"
shoal run examples/char_lm.py -n 2 --strategy "shard=2"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal
from shoal.models import gpt

TEXT = Path(__file__).parents[1] / "LICENSE"


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text; the target is the same window, shifted by one character."""

    def __init__(self, text: str, context: int) -> None:
        self.letters = sorted(set(text))
        self.codes = torch.tensor([self.letters.index(c) for c in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.codes[start : start + self.context + 1]
        return window[:-1], window[1:]


def loss(logits: Tensor, target: Tensor) -> Tensor:  # (batch, time, vocab), (batch, time)
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@torch.no_grad()
def write(model: nn.Module, text: Characters, length: int) -> str:
    codes = text.codes[None, :8]  # (1, time)
    for _ in range(length):
        logits = model(codes[:, -text.context :])[0, -1]
        sampled = torch.multinomial(torch.softmax(logits / 0.7, -1), 1)
        codes = torch.cat([codes, sampled[None]], 1)
    return "".join(text.letters[i] for i in codes[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--write", type=int, default=200, help="characters to write at the end")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = Characters(TEXT.read_text(), context=64)
    model = gpt(len(text.letters), context=64, layers=2, heads=4, width=args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with shoal.distribute(model, optimizer, loss=loss, clip=1.0) as run:
        for batch in run.loader(text, batch_size=24, epochs=args.epochs, seed=0):
            step = run.step(batch)
            if run.is_main and step.number % 20 == 0:
                print(f"step {step.number:4d}   loss {step.loss:.3f}")
        metrics = run.evaluate(text, batch_size=24)
        if run.is_main:
            print(f"loss {metrics['loss']:.3f} after {run.steps} steps")
        if run.is_main and run.size == 1:
            print(write(model, text, args.write))


if __name__ == "__main__":
    main()
