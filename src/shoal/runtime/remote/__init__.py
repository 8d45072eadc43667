"""Parameter servers, and the pairwise averaging of AD-PSGD, over TCP sockets."""
