"""Memory shared by the ranks of a node: segments and their buffers, the barrier, futexes."""
