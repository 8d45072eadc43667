"""Shipped test tools: lockstep workers, real processes, and the contract every member keeps."""
