"""Save the state of a run in checkpoints, and restore it on the same or other workers."""
