"""Save, seed and restore the random generators of this process while data are read.

Reading a sample must not change the generators that dropout uses: otherwise prefetching, resuming
or another number of workers would change the training.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GeneratorStates(NamedTuple):
    """States of torch's CPU generator, of ``random``, and of numpy (None if not imported)."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: Any


def get_states() -> GeneratorStates:
    """Return the current states."""
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    return GeneratorStates(torch.get_rng_state(), random.getstate(), numpy_state)


def set_states(states: GeneratorStates) -> None:
    """Set the states that :func:`get_states` returned."""
    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


def seed(number: int) -> None:
    """Seed torch's CPU generator, ``random`` and numpy (if imported), but no device's generator."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def fork_rng() -> Iterator[None]:
    """Restore all three states after the block; ``torch.random.fork_rng`` restores only torch's."""
    states = get_states()
    try:
        yield
    finally:
        set_states(states)
