"""Simulation in virtual time. Only tests use it so far."""
