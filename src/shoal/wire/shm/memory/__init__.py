"""Memory shared by the ranks of a node: segments, buffers, rings, the barrier and futexes."""
