"""Write your own loop: accumulation, clipping, autocast, a schedule, early stopping.

    shoal run examples/own_loop.py -n 2

`run.step(batch)` does exactly what the three numbered lines do. Written out, they leave room for
your own code.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import shoal


def waves(count: int) -> TensorDataset:
    """Return noisy samples of sin(x) cos(2y)."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(count, 2, generator=draw) * 6 - 3
    y = torch.sin(x[:, :1]) * torch.cos(2 * x[:, 1:])
    return TensorDataset(x, y + 0.05 * torch.randn(count, 1, generator=draw))


def huber(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.huber_loss(output.float(), target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--patience", type=int, default=3, help="epochs without progress")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = random_split(waves(args.samples), [0.8, 0.2])
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    best, since = float("inf"), 0

    with shoal.distribute(model, optimizer, loss=huber, accumulate=4, clip=1.0) as run:
        for epoch in range(args.epochs):
            for batch in run.loader(train, batch_size=200, epochs=1, seed=epoch):
                for micro in run.micro(batch):  # 1: four micro-batches (accumulate=4)
                    with torch.autocast(run.device.type, torch.bfloat16):
                        loss = run.forward(micro)
                    run.backward(loss)  # 2: sum gradients; the last call sends them
                step = run.update()  # 3: agree, clip, update
            schedule.step()
            now = run.evaluate(test)["loss"]
            best, since = (now, 0) if now < 0.99 * best else (best, since + 1)
            if run.is_main:
                print(f"epoch {epoch:2d}   loss {step.loss:.4f}   test {now:.4f}")
            if run.agree(since >= args.patience, how="max"):  # all workers stop, or none
                break


if __name__ == "__main__":
    main()
