"""Helpers for routes: fold to a power of two, price, prove, and choose by size."""
