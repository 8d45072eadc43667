"""Train a Hugging Face model from its config: dict batches, and the model's own loss.

    shoal run examples/huggingface.py -n 2
    shoal run examples/huggingface.py -n 2 --strategy "error_feedback(powersgd(4))"

Nothing is downloaded: the weights are random, and the text is part of Python.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import shoal

with contextlib.redirect_stdout(io.StringIO()):
    import this  # prints the Zen of Python

CONTEXT = 32


def zen() -> list[dict[str, Tensor]]:
    """Return windows of the Zen of Python, byte by byte, in the form of a tokenizer's output."""
    codes = torch.tensor(list(codecs.decode(this.s, "rot13").encode()))
    windows = codes.unfold(0, CONTEXT, CONTEXT // 4)  # (samples, context)
    return [{"input_ids": window, "labels": window} for window in windows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=CONTEXT, n_embd=48, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * 7)

    data = zen()
    with shoal.distribute(model, optimizer, clip=1.0) as run:  # no loss: the model computes it
        for batch in run.loader(data, batch_size=16, epochs=args.epochs, seed=0):
            step = run.step(batch)
            schedule.step()
            if run.is_main and step.number % 20 == 0:
                print(f"step {step.number:4d}   loss {step.loss:.3f}")
        metrics = run.evaluate(data, batch_size=16)
        if run.is_main:
            print(f"loss {metrics['loss']:.3f} after {run.steps} steps")


if __name__ == "__main__":
    main()
