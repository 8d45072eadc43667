"""Train one model on many machines: a strategy is one line of text, checked, explained and run.

>>> import shoal
>>> shoal.parse("all_reduce, local(8), error_feedback(topk(0.01))")
data, all_reduce, local(8), fifo, error_feedback(topk(0.01)), native

Names are loaded when they are first used, so that ``import shoal`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.wire.shm.registration import register as _register

if TYPE_CHECKING:
    from shoal.axes.collectives import native, ring
    from shoal.axes.compression import cast, error_feedback, exact, powersgd, topk
    from shoal.axes.coordination import all_reduce, gossip, parameter_server
    from shoal.axes.partition import data, pipe, shard, tensor
    from shoal.axes.scheduling import fifo, priority, wfbp
    from shoal.axes.synchrony import asp, bsp, local, ssp
    from shoal.runtime.capture import capture
    from shoal.runtime.distribute import distribute
    from shoal.runtime.evaluation import accuracy
    from shoal.runtime.run import Run
    from shoal.runtime.step import Step
    from shoal.runtime.train import progress, train
    from shoal.strategy import Strategy, parse

__version__ = "0.1.0"

_HOMES = {
    "Run": "shoal.runtime.run",
    "Step": "shoal.runtime.step",
    "Strategy": "shoal.strategy",
    "accuracy": "shoal.runtime.evaluation",
    "all_reduce": "shoal.axes.coordination",
    "asp": "shoal.axes.synchrony",
    "bsp": "shoal.axes.synchrony",
    "capture": "shoal.runtime.capture",
    "cast": "shoal.axes.compression",
    "data": "shoal.axes.partition",
    "distribute": "shoal.runtime.distribute",
    "error_feedback": "shoal.axes.compression",
    "exact": "shoal.axes.compression",
    "fifo": "shoal.axes.scheduling",
    "gossip": "shoal.axes.coordination",
    "local": "shoal.axes.synchrony",
    "native": "shoal.axes.collectives",
    "parameter_server": "shoal.axes.coordination",
    "parse": "shoal.strategy",
    "pipe": "shoal.axes.partition",
    "powersgd": "shoal.axes.compression",
    "priority": "shoal.axes.scheduling",
    "progress": "shoal.runtime.train",
    "ring": "shoal.axes.collectives",
    "shard": "shoal.axes.partition",
    "ssp": "shoal.axes.synchrony",
    "tensor": "shoal.axes.partition",
    "topk": "shoal.axes.compression",
    "train": "shoal.runtime.train",
    "wfbp": "shoal.axes.scheduling",
}

__all__ = [
    "Run",
    "Step",
    "Strategy",
    "accuracy",
    "all_reduce",
    "asp",
    "bsp",
    "capture",
    "cast",
    "data",
    "distribute",
    "error_feedback",
    "exact",
    "fifo",
    "gossip",
    "local",
    "native",
    "parameter_server",
    "parse",
    "pipe",
    "powersgd",
    "priority",
    "progress",
    "ring",
    "shard",
    "ssp",
    "tensor",
    "topk",
    "train",
    "wfbp",
]


_register()  # dist.init_process_group("shoal"); loads torch no sooner than others do


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
