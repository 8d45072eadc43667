"""Train one model on many machines: a strategy is one line of text, checked, explained and run.

>>> import shoal
>>> shoal.parse("all_reduce, local(8), error_feedback(topk(0.01))")
data, all_reduce, local(8), fifo, error_feedback(topk(0.01)), native

Names are loaded on first use, so that ``import shoal`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.wire.shm.backend.registration import register as _register

if TYPE_CHECKING:
    from shoal.axes.collectives import (
        blueconnect,
        butterfly,
        double_tree,
        fastest,
        halving_doubling,
        hierarchical,
        linear,
        native,
        ring,
        tree,
    )
    from shoal.axes.compression import (
        after,
        by_size,
        cast,
        coded,
        dgc,
        difference,
        error_feedback,
        esgd,
        exact,
        gtopk,
        int8,
        momentum_correction,
        natural,
        onebit,
        powersgd,
        qsgd,
        random_k,
        sign,
        sufficient_factors,
        terngrad,
        threshold,
        topk,
        tuned,
        twobit,
    )
    from shoal.axes.coordination import (
        all_reduce,
        bmuf,
        gossip,
        parameter_server,
    )
    from shoal.axes.partition import (
        data,
        pipe,
        shard,
        tensor,
    )
    from shoal.axes.scheduling import (
        adaptive,
        dear,
        fifo,
        fused,
        magnitude,
        merged,
        mlnet,
        priority,
        tictac,
        wfbp,
    )
    from shoal.axes.synchrony import (
        asp,
        bsp,
        local,
        ssp,
    )
    from shoal.runtime.capture import capture
    from shoal.runtime.distribute import distribute
    from shoal.runtime.evaluate import accuracy
    from shoal.runtime.run import Run
    from shoal.runtime.step.stats import Step
    from shoal.runtime.train import progress, train
    from shoal.strategy import Strategy, parse

__version__ = "0.1.0"

_HOMES = {
    "Run": "shoal.runtime.run",
    "Step": "shoal.runtime.step.stats",
    "Strategy": "shoal.strategy",
    "accuracy": "shoal.runtime.evaluate",
    "adaptive": "shoal.axes.scheduling",
    "after": "shoal.axes.compression",
    "all_reduce": "shoal.axes.coordination",
    "asp": "shoal.axes.synchrony",
    "blueconnect": "shoal.axes.collectives",
    "bmuf": "shoal.axes.coordination",
    "bsp": "shoal.axes.synchrony",
    "butterfly": "shoal.axes.collectives",
    "by_size": "shoal.axes.compression",
    "capture": "shoal.runtime.capture",
    "cast": "shoal.axes.compression",
    "coded": "shoal.axes.compression",
    "data": "shoal.axes.partition",
    "dear": "shoal.axes.scheduling",
    "dgc": "shoal.axes.compression",
    "difference": "shoal.axes.compression",
    "distribute": "shoal.runtime.distribute",
    "double_tree": "shoal.axes.collectives",
    "error_feedback": "shoal.axes.compression",
    "esgd": "shoal.axes.compression",
    "exact": "shoal.axes.compression",
    "fastest": "shoal.axes.collectives",
    "fifo": "shoal.axes.scheduling",
    "fused": "shoal.axes.scheduling",
    "gossip": "shoal.axes.coordination",
    "gtopk": "shoal.axes.compression",
    "halving_doubling": "shoal.axes.collectives",
    "hierarchical": "shoal.axes.collectives",
    "int8": "shoal.axes.compression",
    "linear": "shoal.axes.collectives",
    "local": "shoal.axes.synchrony",
    "magnitude": "shoal.axes.scheduling",
    "merged": "shoal.axes.scheduling",
    "mlnet": "shoal.axes.scheduling",
    "momentum_correction": "shoal.axes.compression",
    "native": "shoal.axes.collectives",
    "natural": "shoal.axes.compression",
    "onebit": "shoal.axes.compression",
    "parameter_server": "shoal.axes.coordination",
    "parse": "shoal.strategy",
    "pipe": "shoal.axes.partition",
    "powersgd": "shoal.axes.compression",
    "priority": "shoal.axes.scheduling",
    "progress": "shoal.runtime.train",
    "qsgd": "shoal.axes.compression",
    "random_k": "shoal.axes.compression",
    "ring": "shoal.axes.collectives",
    "shard": "shoal.axes.partition",
    "sign": "shoal.axes.compression",
    "ssp": "shoal.axes.synchrony",
    "sufficient_factors": "shoal.axes.compression",
    "tensor": "shoal.axes.partition",
    "terngrad": "shoal.axes.compression",
    "threshold": "shoal.axes.compression",
    "tictac": "shoal.axes.scheduling",
    "topk": "shoal.axes.compression",
    "tuned": "shoal.axes.compression",
    "train": "shoal.runtime.train",
    "tree": "shoal.axes.collectives",
    "twobit": "shoal.axes.compression",
    "wfbp": "shoal.axes.scheduling",
}

__all__ = [
    "Run",
    "Step",
    "Strategy",
    "accuracy",
    "adaptive",
    "after",
    "all_reduce",
    "asp",
    "blueconnect",
    "bmuf",
    "bsp",
    "butterfly",
    "by_size",
    "capture",
    "cast",
    "coded",
    "data",
    "dear",
    "dgc",
    "difference",
    "distribute",
    "double_tree",
    "error_feedback",
    "esgd",
    "exact",
    "fastest",
    "fifo",
    "fused",
    "gossip",
    "gtopk",
    "halving_doubling",
    "hierarchical",
    "int8",
    "linear",
    "local",
    "magnitude",
    "merged",
    "mlnet",
    "momentum_correction",
    "native",
    "natural",
    "onebit",
    "parameter_server",
    "parse",
    "pipe",
    "powersgd",
    "priority",
    "progress",
    "qsgd",
    "random_k",
    "ring",
    "shard",
    "sign",
    "ssp",
    "sufficient_factors",
    "tensor",
    "terngrad",
    "threshold",
    "tictac",
    "topk",
    "train",
    "tree",
    "tuned",
    "twobit",
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
