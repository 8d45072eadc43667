"""Partition: how the model and the batch are divided among ranks. One file per technique."""

from shoal.axes.partition.data import data
from shoal.axes.partition.partition import Partition
from shoal.axes.partition.pipe import pipe
from shoal.axes.partition.shard import shard
from shoal.axes.partition.tensor import tensor

MEMBERS = (data, shard, tensor, pipe)

__all__ = ["MEMBERS", "Partition", "data", "pipe", "shard", "tensor"]
