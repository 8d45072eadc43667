"""Wires carry messages between workers. They contain no training algorithm."""
