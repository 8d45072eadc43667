"""The process's random generators, borrowed for reading data and given back untouched.

Reading a sample must not move the generators that dropout uses: otherwise prefetching, resuming or
another number of workers would change the training.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Generators(NamedTuple):
    """States of torch's CPU generator, of ``random`` and of numpy (None when not imported)."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: Any


def capture() -> Generators:
    """The states as they are now."""
    numpy = sys.modules.get("numpy")
    held = None if numpy is None else numpy.random.get_state()
    return Generators(torch.get_rng_state(), random.getstate(), held)


def restore(states: Generators) -> None:
    """Put captured states back."""
    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


def seed(number: int) -> None:
    """Seed all three; devices are left alone, since samples are made on the CPU."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def borrowed() -> Iterator[None]:
    """Whatever happens to the generators inside is undone at the end."""
    held = capture()
    try:
        yield
    finally:
        restore(held)
