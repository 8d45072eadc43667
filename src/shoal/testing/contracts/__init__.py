"""The laws of every axis: run them on a technique of your own.

>>> from shoal.axes.compression import topk
>>> from shoal.testing.contracts import check, check_member
>>> check(topk(0.1))        # one value: every law of its axis
>>> check_member(topk)      # the function: its docstring, its samples, and the laws of each sample

A law that does not hold raises ``AssertionError``, which names the member, the case and the law.
``laws_of(value)`` gives the laws one by one, to be listed in ``pytest.mark.parametrize``.
"""

from shoal.testing.contracts.member import check, check_member, laws_of, make, samples

__all__ = ["check", "check_member", "laws_of", "make", "samples"]
