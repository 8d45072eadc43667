"""With whom do I agree? One file an answer."""

from shoal.axes.coordination.all_reduce import all_reduce
from shoal.axes.coordination.coordination import Coordination, spectral_gap
from shoal.axes.coordination.gossip import gossip
from shoal.axes.coordination.parameter_server import parameter_server

MEMBERS = (all_reduce, parameter_server, gossip)

__all__ = ["MEMBERS", "Coordination", "all_reduce", "gossip", "parameter_server", "spectral_gap"]
