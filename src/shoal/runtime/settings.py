"""The options of a run except its strategy."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from shoal.errors import BadArgument, UnknownName
from shoal.loggers import Logger
from shoal.notation import is_number
from shoal.runtime.launcher.options import BACKENDS, unusable
from shoal.runtime.world.env import CHECKPOINT


class RunOptions(TypedDict, total=False):
    """The keyword arguments of ``distribute`` (see :class:`Settings`)."""

    accumulate: int
    clip: float | None
    nonfinite: Literal["stop", "skip"]
    backend: str | None
    timeout: float | None
    checkpoint: str | os.PathLike[str] | None
    every: int
    keep: int
    timeline: bool
    logger: Logger | None
    stateful: Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """The options of a run. The constructor raises if an option is invalid.

    Args:
        accumulate: the number of micro-batches per step. Gradients are exchanged once per step.
        clip: the largest 2-norm of the averaged gradient. A larger gradient is scaled down.
        nonfinite: what to do if a NaN or inf occurs. "stop" (default) checks the loss in every
            step, and the gradient if ``clip`` is set, and raises. "skip" checks both in every step,
            and all workers skip the update. With early updates (priority), only losses are checked.
        backend: gloo, nccl or shoal (CPU, all ranks on one host). None means nccl if every worker
            has a GPU, otherwise shoal if all workers are on one host, otherwise gloo.
        timeout: after how many seconds an exchange fails, with an error that names missing ranks.
            None means the variable SHOAL_TIMEOUT, or 300 if it is not set.
        checkpoint: the directory for a checkpoint every ``every`` steps and at the end.
        every: the number of steps between checkpoints.
        keep: how many checkpoints to keep. Older checkpoints are deleted.
        timeline: whether to record the timeline.
        logger: an object whose ``log(metrics, step)`` is called after each step, on the main rank.
        stateful: other objects to save and restore, by name, for example a scheduler. Each must
            have ``state_dict`` and ``load_state_dict``.
    """

    accumulate: int = 1
    clip: float | None = None
    nonfinite: Literal["stop", "skip"] = "stop"
    backend: str | None = None
    timeout: float | None = None
    checkpoint: str | os.PathLike[str] | None = None
    every: int = 100
    keep: int = 3
    timeline: bool = True
    logger: Logger | None = None
    stateful: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("accumulate", "every", "keep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadArgument(f"{name}={value!r}", "must be a whole number >= 1")
        for name in ("clip", "timeout"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < math.inf):
                raise BadArgument(f"{name}={value!r}", "must be a positive, finite number, or None")
        if self.nonfinite not in ("stop", "skip"):
            raise UnknownName("nonfinite policy", str(self.nonfinite), ("stop", "skip"))
        if self.backend not in (None, *BACKENDS):
            raise UnknownName("backend", str(self.backend), BACKENDS)
        if self.logger is not None and not callable(getattr(self.logger, "log", None)):
            raise BadArgument(f"logger={self.logger!r}", "must have a method log(metrics, step)")
        _check_stateful(self.stateful)
        if self.checkpoint is not None:
            _check_directory(self.checkpoint)

    @classmethod
    def named(cls, options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
        """Return settings from keyword arguments. If a name is unknown, raise with similar names.

        ``--checkpoint`` of the command line replaces the script's ``checkpoint``.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownName("option of distribute", name, known)
        directory = environ.get(CHECKPOINT)
        return cls(**{**options, "checkpoint": directory} if directory else options)


def _check_stateful(stateful: object) -> None:
    if not isinstance(stateful, Mapping):
        raise BadArgument(f"stateful={stateful!r}", "must be a dict, {'scheduler': scheduler}")
    for name, value in stateful.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                kind = type(value).__name__
                raise BadArgument(f"stateful={{{name!r}: {kind}}}", f"it has no method {method}()")


def _check_directory(path: object) -> None:
    """Raise if checkpoints cannot be written to this directory."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise BadArgument(f"checkpoint={path!r}", "must be the path of a directory, or None")
    if why := unusable(Path(path)):
        raise BadArgument(f"checkpoint={os.fspath(path)!r}", f"{why}; choose another directory")
