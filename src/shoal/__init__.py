"""Train one model on many machines, with a strategy that is written as one line of text.

>>> import shoal
>>> shoal.parse("all_reduce, local(8), error_feedback(topk(0.01))")
data, all_reduce, local(8), fifo, error_feedback(topk(0.01)), native

The modules of public names are imported on first use, so ``import shoal`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.wire.shm.backend.registration import register as _register

# fmt: off
# isort: off
if TYPE_CHECKING:
    from shoal.axes.collectives import (
        blueconnect, butterfly, double_tree, fastest, halving_doubling, hierarchical, linear,
        native, ring, tree,
    )
    from shoal.axes.compression import (
        after, by_size, cast, coded, dgc, difference, error_feedback, esgd, exact, gtopk, int8,
        momentum_correction, natural, onebit, powersgd, qsgd, random_k, sign, sufficient_factors,
        terngrad, threshold, topk, tuned, twobit,
    )
    from shoal.axes.coordination import all_reduce, bmuf, gossip, parameter_server
    from shoal.axes.partition import data, pipe, shard, tensor
    from shoal.axes.scheduling import (
        adaptive, dear, fifo, fused, magnitude, merged, mlnet, priority, tictac, wfbp,
    )
    from shoal.axes.synchrony import asp, bsp, local, ssp
    from shoal.runtime.capture import capture
    from shoal.runtime.distribute import distribute
    from shoal.runtime.evaluate import accuracy
    from shoal.runtime.run import Run
    from shoal.runtime.step.stats import Step
    from shoal.runtime.train import progress, train
    from shoal.strategy import Strategy, parse
# isort: on

__version__ = "0.1.0"

_HOMES = {
    "shoal.axes.collectives":
        "blueconnect butterfly double_tree fastest halving_doubling hierarchical linear native "
        "ring tree",
    "shoal.axes.compression":
        "after by_size cast coded dgc difference error_feedback esgd exact gtopk int8 "
        "momentum_correction natural onebit powersgd qsgd random_k sign sufficient_factors "
        "terngrad threshold topk tuned twobit",
    "shoal.axes.coordination": "all_reduce bmuf gossip parameter_server",
    "shoal.axes.partition": "data pipe shard tensor",
    "shoal.axes.scheduling": "adaptive dear fifo fused magnitude merged mlnet priority tictac wfbp",
    "shoal.axes.synchrony": "asp bsp local ssp",
    "shoal.runtime.capture": "capture",
    "shoal.runtime.distribute": "distribute",
    "shoal.runtime.evaluate": "accuracy",
    "shoal.runtime.run": "Run",
    "shoal.runtime.step.stats": "Step",
    "shoal.runtime.train": "progress train",
    "shoal.strategy": "Strategy parse",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Run", "Step", "Strategy", "accuracy", "adaptive", "after", "all_reduce", "asp", "blueconnect",
    "bmuf", "bsp", "butterfly", "by_size", "capture", "cast", "coded", "data", "dear", "dgc",
    "difference", "distribute", "double_tree", "error_feedback", "esgd", "exact", "fastest", "fifo",
    "fused", "gossip", "gtopk", "halving_doubling", "hierarchical", "int8", "linear", "local",
    "magnitude", "merged", "mlnet", "momentum_correction", "native", "natural", "onebit",
    "parameter_server", "parse", "pipe", "powersgd", "priority", "progress", "qsgd", "random_k",
    "ring", "shard", "sign", "ssp", "sufficient_factors", "tensor", "terngrad", "threshold",
    "tictac", "topk", "train", "tree", "tuned", "twobit", "wfbp",
]
# fmt: on

_register()  # allows dist.init_process_group("shoal"); does not import torch


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
