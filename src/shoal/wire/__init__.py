"""Wires: they carry messages between workers; they contain no training algorithm."""
