"""Train an image classifier: a small convolutional network on scikit-learn's 1,797 digits.

shoal run examples/digits.py -n 2
shoal run examples/digits.py -n 2 --strategy "local(8), error_feedback(topk(0.05))"
python examples/digits.py --epochs 3
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return images in [0, 1] and their labels; every fifth is in the test set."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    test = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers together")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with shoal.distribute(model, optimizer, loss=nn.functional.cross_entropy) as run:
        feed = run.loader(train, batch_size=args.batch_size, epochs=args.epochs, seed=0)
        start, samples = time.perf_counter(), 0
        with shoal.progress(run, feed) as show:
            for batch in feed:
                step = run.step(batch)
                samples += step.samples
                show(step)
        rate = samples / (time.perf_counter() - start)
        metrics = run.evaluate(test, metrics={"accuracy": shoal.accuracy})
        if run.is_main:
            columns = {
                "steps": f"{run.steps}",
                "training loss": f"{step.loss:.4f}",
                "test loss": f"{metrics['loss']:.4f}",
                "test accuracy": f"{metrics['accuracy']:.1%}",
                "samples/s": f"{rate:,.0f}",
            }
            table = Table(*columns, title="Digits", title_justify="left")
            table.add_row(*columns.values())
            Console().print(table)


if __name__ == "__main__":
    main()
