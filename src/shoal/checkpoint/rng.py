"""The state of every random generator of this process, as tensors and numbers, without pickle."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """Python's, torch's, and NumPy's and CUDA's where in use; for :class:`State.mine`."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        state["numpy"] = _numpy_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on from where :func:`rng_state` was taken; generators absent from it are left alone."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        _set_numpy_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        for device, words in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(words.cpu(), device)


def _numpy_state() -> dict[str, Any]:
    import numpy as np

    state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    return {
        "key": torch.from_numpy(state["state"]["key"].astype(np.int64)),
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _set_numpy_state(state: dict[str, Any]) -> None:
    import numpy as np

    key = state["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, state["position"], state["has_gauss"], state["gauss"]))
