"""Cost models: compute the seconds of a message and of a collective without running them."""
