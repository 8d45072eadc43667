"""Simulation without hardware, in virtual time. Nothing in the package calls it yet but tests."""
