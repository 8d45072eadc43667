"""Runs that need no hardware: virtual time in, a timeline out."""
