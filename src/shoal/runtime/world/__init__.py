"""Join the other ranks of a run, and detect that one of them failed."""
