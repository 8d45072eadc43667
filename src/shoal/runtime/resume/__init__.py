"""Checkpoints of a run: what is saved, how it is restored, and when."""
