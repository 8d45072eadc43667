"""Test tools: lockstep workers, worker processes, and contracts that every technique meets."""
