"""Parameter server: workers exchange messages with servers, not with each other.

With bsp or local(h) the servers only reduce: they return the mean of the messages of all workers,
and every worker updates its own replica. With ssp or asp the servers hold the model and the
optimizer: a worker pushes a gradient and pulls the new model.

References:
    Li et al., `Scaling distributed machine learning with the parameter server
    <https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu>`_, 2014.
    Jiang et al., `BytePS <https://www.usenix.org/conference/osdi20/presentation/jiang>`_, 2020 (the
    summation service).
"""

from __future__ import annotations

from shoal.axes.coordination.coordination import Coordination, complete
from shoal.errors import BadArgument
from shoal.notation import is_whole


def parameter_server(servers: int = 1) -> Coordination:
    """Exchange messages with ``servers`` extra processes, each of which has a part of the model.

    Args:
        servers: number of servers; each gets parameters of about the same total size.
    """
    name = f"parameter_server({servers})"
    if not is_whole(servers, 1, 64):
        raise BadArgument(name, "servers must be a whole number from 1 to 64")
    return Coordination(name, "server", "gradient", complete, servers)
