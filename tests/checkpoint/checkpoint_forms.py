"""A small state, and ways to forge a manifest."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import State


def small(step: int) -> State:
    """A state whose values tell its step."""
    value = float(step)
    shared = {"model": {"w": torch.full((3, 2), value), "b": torch.arange(4.0) + value}}
    return State(shared, mine={"residual": torch.full((5,), value)}, meta={"step": step})


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the body of a manifest and seal it again, as an attacker would."""
    file = path / "manifest.json"
    body = json.loads(file.read_bytes())
    del body["crc32"]
    change(body)
    seal(file, json.dumps(body).encode())


def seal(file: Path, text: bytes) -> None:
    """Write a manifest of this JSON text with a right CRC-32."""
    rest = text.lstrip()[1:]
    file.write_bytes(b'{"crc32":"%08x",' % zlib.crc32(rest) + rest)
