"""Make ``init_process_group("shoal")`` work after ``import shoal``, without loading torch for it.

If torch.distributed is there, the backend is registered at once, which costs microseconds: what is
registered is a function that loads the backend when the first group is made. If it is not, a finder
waits for its import, registers then, and goes.

Let ``torch.distributed.monitored_barrier`` pass to groups of the shoal backend.

torch's function knows the method by that name on every group, but refuses all backends except gloo
by name, and there is no way to be added. So it is given a door in front: a shoal group goes to its
own method, everything else to torch's function as it was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "shoal"
_AWAITED = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register the backend with torch.distributed, now or when that is imported; once."""
    module = sys.modules.get(_AWAITED)
    if module is not None and hasattr(module, "init_process_group"):
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def why_not() -> str | None:
    """Why this machine cannot share memory between ranks; None if it can."""
    if sys.platform != "linux":
        return f"the shoal backend needs Linux, this is {sys.platform}"
    if not hasattr(os, "memfd_create") and not os.access("/dev/shm", os.W_OK):
        return "there is neither memfd_create nor a /dev/shm to write to"
    return None


def _register(module: Any) -> None:
    backend = module.Backend
    if NAME.upper() not in backend._plugins:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        admit(module, NAME)


def _create(options: Any, backend_options: Any = None) -> Any:
    from shoal.wire.shm.backend.process_group import create

    return create(options, backend_options)


class _Finder(MetaPathFinder):
    """Lets the ordinary finders find torch.distributed, and learns when it has been loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only for the one module; the finder has then done its work."""
        if name != _AWAITED:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads as another loader does, and registers the backend after."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the inner loader does."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the inner loader does; then register."""
        self._inner.exec_module(module)
        _register(module)


def admit(module: Any, backend: str) -> None:
    """Put the door before ``module.monitored_barrier``, wherever torch shows it; once.

    Args:
        module: ``torch.distributed.distributed_c10d``.
        backend: whose groups have a method of their own.
    """
    original = module.monitored_barrier
    if getattr(original, "admits", None) == backend:
        return

    @wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        chosen = module.group.WORLD if group is None else group
        member = chosen is not None and chosen is not module.GroupMember.NON_GROUP_MEMBER
        if not member or module.get_backend(chosen) != backend:
            return original(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        return chosen.monitored_barrier(limit, wait_all_ranks)

    monitored_barrier.admits = backend  # type: ignore[attr-defined]
    for shown in (module, sys.modules.get("torch.distributed")):
        if getattr(shown, "monitored_barrier", None) is original:
            shown.monitored_barrier = monitored_barrier  # type: ignore[union-attr]
