"""Get and set the states of the global random generators of this process, without pickle."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, torch, NumPy and CUDA.

    NumPy's state is left out if NumPy is not imported, and CUDA's if there is no CUDA device. The
    result holds only values that :attr:`State.mine` can hold.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        import numpy as np

        numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
        state["numpy"] = {
            "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Set the states that :func:`rng_state` returned. Generators without one are not changed."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        numpy = state["numpy"]
        key = numpy["key"].numpy().astype(np.uint32)
        legacy = ("MT19937", key, numpy["position"], numpy["has_gauss"], numpy["gauss"])
        np.random.set_state(legacy)
    if "cuda" in state and torch.cuda.is_available():
        for device, saved in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(saved.cpu(), device)
