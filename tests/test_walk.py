"""How many files a reader opens to follow one training step.

A profile hook records the files that a step enters. Only `runtime/` and `wire/` count, because the
step is told there; `wire/shm` does not, because a step over gloo never enters it.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo
SOURCE = Path(shoal.__file__).parent
ROOMS = (SOURCE / "runtime", SOURCE / "wire")


def files_of_a_step(strategy: str, exchange_step: int) -> list[str]:
    """Train up to a step that exchanges, and return the files which that step enters.

    The hook is set before ``distribute`` starts its threads, so that these are recorded too.
    """
    entered: set[str] = set()
    recording = False

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        if recording and event == "call":
            entered.add(frame.f_code.co_filename)

    threading.setprofile(on_call)
    sys.setprofile(on_call)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(96, 6), torch.randint(4, (96,)))
    loss = nn.functional.cross_entropy
    with shoal.distribute(model, optimizer, loss=loss, strategy=strategy, backend="gloo") as run:
        for batch in run.loader(data, batch_size=8, epochs=9):
            recording = run.steps == exchange_step
            run.step(batch)
            if recording:
                recording = False
                break
    sys.setprofile(None)
    threading.setprofile(None)
    rooms = [Path(name).resolve() for name in entered]
    rooms = [name for name in rooms if any(room in name.parents for room in ROOMS)]
    return sorted(str(n.relative_to(SOURCE)) for n in rooms if SOURCE / "wire/shm" not in n.parents)


@pytest.mark.parametrize(
    ("strategy", "workers", "exchange_step", "limit"),
    [
        ("all_reduce", 2, 1, 14),
        ("local(4), error_feedback(topk(0.25))", 2, 7, 14),
        ("shard=2", 4, 1, 14),
        ("parameter_server", 2, 1, 16),
        ("parameter_server, ssp(3)", 2, 1, 16),
    ],
)
def test_a_step_is_told_in_few_files(
    strategy: str, workers: int, exchange_step: int, limit: int
) -> None:
    servers = shoal.parse(strategy).coordination.servers
    args = (strategy, exchange_step)
    for files in run_workers(workers, files_of_a_step, *args, servers=servers):
        assert "runtime/run.py" in files
        assert len(files) <= limit, "\n".join(files)
