"""Resume after a kill, with the same samples and the same results as without it.

    shoal run examples/resume.py -n 2 --max-restarts 1 -- --die-at 30     # dies once, resumes, ends
    shoal run examples/resume.py -n 2 --resume                            # or by hand, later

`--die-at` simulates the fault: rank 0 kills itself with SIGKILL, once.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--checkpoints", type=Path, default=Path("shoal-runs/resume"))
    parser.add_argument("--die-at", type=int, default=None, help="step at which rank 0 dies, once")
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(640, 16)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    run = shoal.distribute(
        model,
        optimizer,
        loss=nn.functional.cross_entropy,
        checkpoint=args.checkpoints,
        every=args.every,
        keep=2,
    )
    started = run.steps  # 0, or the step of the checkpoint
    if run.is_main and started:
        print(f"resumed at step {started}")
    with run:
        for batch in run.loader(data, batch_size=64, epochs=args.epochs, seed=0):
            step = run.step(batch)
            if step.number == args.die_at and run.is_main and not started:
                print(f"dying at step {step.number}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        result = run.evaluate(data, metrics={"accuracy": shoal.accuracy})
        if run.is_main:
            weight = sum(float(p.detach().double().sum()) for p in model.parameters())
            print(
                f"loss {result['loss']:.6f}   accuracy {result['accuracy']:.1%}   sum {weight:.9f}"
            )


if __name__ == "__main__":
    main()
