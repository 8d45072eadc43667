"""Coordination: with which workers a worker exchanges messages. One file per technique."""

from shoal.axes.coordination.all_reduce import all_reduce
from shoal.axes.coordination.bmuf import bmuf
from shoal.axes.coordination.coordination import Coordination, Outer, spectral_gap
from shoal.axes.coordination.gossip import gossip
from shoal.axes.coordination.parameter_server import parameter_server

MEMBERS = (all_reduce, parameter_server, gossip, bmuf)

__all__ = [
    "MEMBERS", "Coordination", "Outer", "all_reduce", "bmuf", "gossip", "parameter_server",
    "spectral_gap",
]  # fmt: skip
