"""Join the other ranks of a run, and learn when one of them fails."""
