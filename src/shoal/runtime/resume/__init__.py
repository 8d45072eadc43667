"""Save a run in checkpoints, and restore it on the same or another number of workers."""
