"""Wires: they carry messages between workers, and know no training technique."""
