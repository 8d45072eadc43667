"""Train one model on many machines: describe, predict, run, compare, share.

>>> import shoal
>>> shoal.parse("all_reduce, local(8), error_feedback(topk(0.01))")
data, all_reduce, local(8), fifo, error_feedback(topk(0.01)), native
"""

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
from shoal.runtime.train import train
from shoal.strategy import Strategy, parse

__version__ = "0.1.0"

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
    "ring",
    "shard",
    "ssp",
    "tensor",
    "topk",
    "train",
    "wfbp",
]
