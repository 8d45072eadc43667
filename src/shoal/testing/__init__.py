"""Test tools: workers in lockstep, worker processes, and contracts that test any technique."""
