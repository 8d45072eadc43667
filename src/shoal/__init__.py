"""Train one model on many machines: describe, predict, run, compare, share."""

__version__ = "0.1.0"
