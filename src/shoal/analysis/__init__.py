"""Cost models: what a message and a collective cost, before anything runs."""
