"""Workers talk to servers, not to each other.

With bsp a server is a summation service: it answers each ask with the mean of all, and every worker
updates its own replica. With bounded or no waiting (ssp, asp) the server holds the only model that
counts and the only optimizer: a worker pushes a gradient and pulls what the model has become.

References:
    Li et al., `Scaling distributed machine learning with the parameter server
    <https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu>`_, 2014.
    Jiang et al., `BytePS <https://www.usenix.org/conference/osdi20/presentation/jiang>`_, 2020 (the
    summation service).
"""

from __future__ import annotations

from shoal.axes.coordination.coordination import Coordination, complete
from shoal.errors import BadArgument


def parameter_server(servers: int = 1) -> Coordination:
    """Agree through ``servers`` extra processes, each holding a part of the model.

    Args:
        servers: how many; parameters are dealt to them by size.
    """
    if isinstance(servers, bool) or not isinstance(servers, int) or not 1 <= servers <= 64:
        raise BadArgument(
            f"parameter_server({servers})", "servers must be a whole number from 1 to 64"
        )
    return Coordination(f"parameter_server({servers})", "server", "gradient", complete, servers)
