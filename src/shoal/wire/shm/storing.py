"""Read what all ranks have told a store; every kind of store can do it."""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import Store


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """The values of keys, once all are there; in one message where the store can."""
    if getattr(store, "has_extended_api", bool)():
        return list(store.multi_get(list(keys)))
    return [store.get(key) for key in keys]
