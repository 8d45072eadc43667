"""Every test starts and ends outside any run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shoal.runtime.world.join import current, leave


@pytest.fixture(autouse=True)
def _outside_any_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*os.environ]:
        if name.startswith("SHOAL_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    yield
    while (world := current()) is not None:
        leave(world)
