"""Functions for routes: fold ranks to a power of two, compute costs, check, and choose by size."""
