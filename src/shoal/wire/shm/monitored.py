"""Let ``torch.distributed.monitored_barrier`` pass to groups of the shoal backend.

torch's function knows the method by that name on every group, but refuses all backends except gloo
by name, and there is no way to be added. So it is given a door in front: a shoal group goes to its
own method, everything else to torch's function as it was.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import wraps
from typing import Any


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
