"""Make ``init_process_group("shoal")`` work after ``import shoal``, without importing torch.

If torch.distributed is already imported, the backend is registered at once. torch gets a function
that imports the backend when the first group is created. Otherwise an import hook registers it when
torch.distributed is imported, and then removes itself.

``torch.distributed.monitored_barrier`` refuses every backend but gloo. So it is replaced by a
wrapper, which calls a shoal group's own method, and torch's function for every other group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "shoal"
_TORCH_MODULE = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register the backend now or when torch.distributed is imported. Later calls do nothing."""
    module = sys.modules.get(_TORCH_MODULE)
    if module is not None and hasattr(module, "init_process_group"):
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def why_not() -> str | None:
    """Return why this machine cannot share memory between ranks, or None if it can."""
    if sys.platform != "linux":
        return f"the shoal backend needs Linux, but this system is {sys.platform}"
    if not hasattr(os, "memfd_create") and not os.access("/dev/shm", os.W_OK):
        return "this system has neither memfd_create nor a writable /dev/shm"
    return None


def _register(module: Any) -> None:
    backend = module.Backend
    if NAME.upper() not in backend._plugins:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        _wrap_monitored_barrier(module)


def _create(options: Any, backend_options: Any = None) -> Any:
    from shoal.wire.shm.backend.process_group import create

    return create(options, backend_options)


class _Finder(MetaPathFinder):
    """An import hook that registers the backend when torch.distributed is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None, but for ``_TORCH_MODULE`` a spec whose loader also registers the backend."""
        if name != _TORCH_MODULE:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _wrap_monitored_barrier(module: Any) -> None:
    """Replace ``monitored_barrier`` in ``module`` and torch.distributed by a wrapper, only once."""
    original = module.monitored_barrier
    if getattr(original, "wrapped_for", None) == NAME:
        return

    @wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        chosen = module.group.WORLD if group is None else group
        member = chosen is not None and chosen is not module.GroupMember.NON_GROUP_MEMBER
        if not member or module.get_backend(chosen) != NAME:
            return original(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        return chosen.monitored_barrier(limit, wait_all_ranks)

    monitored_barrier.wrapped_for = NAME  # type: ignore[attr-defined]
    for exporter in (module, sys.modules.get("torch.distributed")):
        if getattr(exporter, "monitored_barrier", None) is original:
            exporter.monitored_barrier = monitored_barrier  # type: ignore[union-attr]
