"""The laws of every axis: tests that every technique must pass, including a technique of your own.

>>> from shoal.axes.compression import topk
>>> from shoal.testing.contracts import check, check_member
>>> check(topk(0.1))        # runs every law of the axis on one value
>>> check_member(topk)      # checks the docstring of the function, and runs all laws on its samples

A law that does not hold raises ``AssertionError``, which names the technique, the case, and what is
wrong. ``laws_of(value)`` returns the laws as a tuple, for ``pytest.mark.parametrize``.
"""

from shoal.testing.contracts.member import check, check_member, laws_of, make, samples

__all__ = ["check", "check_member", "laws_of", "make", "samples"]
