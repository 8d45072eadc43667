"""The options of a run besides its strategy."""

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
    """The options of a run, checked.

    Args:
        accumulate: micro-batches per step; their gradients add up before the exchange.
        clip: largest global norm of the averaged gradient (after decompression, before the
            update).
        nonfinite: what to do about a NaN or inf. "stop" (default) checks the loss in every step,
            and the gradient where ``clip`` is set, and ends the run; "skip" checks both in every
            step, and all workers skip the step. Early updates (priority) check losses only.
        backend: gloo, nccl or shoal (CPU, inside a host); None: nccl where every worker has a GPU,
            else shoal where all workers share a host, else gloo.
        timeout: seconds an exchange may take; then an error names the missing rank.
        checkpoint: directory to which a checkpoint is written every ``every`` steps and at the end.
        every: steps between checkpoints.
        keep: how many checkpoints to keep.
        timeline: whether to record spans.
        logger: its ``log(metrics, step)`` is called on the main worker.
        stateful: further objects to save and restore, by name: schedulers, averages, anything
            with ``state_dict`` and ``load_state_dict``.
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
                raise BadArgument(f"{name}={value!r}", "a whole number >= 1")
        for name in ("clip", "timeout"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < math.inf):
                raise BadArgument(f"{name}={value!r}", "a positive, finite number, or None")
        if self.nonfinite not in ("stop", "skip"):
            raise UnknownName("nonfinite policy", str(self.nonfinite), ("stop", "skip"))
        if self.backend not in (None, *BACKENDS):
            raise UnknownName("backend", str(self.backend), BACKENDS)
        if self.logger is not None and not callable(getattr(self.logger, "log", None)):
            raise BadArgument(f"logger={self.logger!r}", "it must have log(metrics, step)")
        _check_stateful(self.stateful)
        if self.checkpoint is not None:
            _check_directory(self.checkpoint)

    @classmethod
    def named(cls, options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
        """Make settings from keyword arguments; an unknown name raises with the nearest names.

        ``--checkpoint`` of the command line wins over the script.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownName("option of distribute", name, known)
        directory = environ.get(CHECKPOINT)
        return cls(**{**options, "checkpoint": directory} if directory else options)


def _check_stateful(stateful: object) -> None:
    if not isinstance(stateful, Mapping):
        raise BadArgument(f"stateful={stateful!r}", "a dict: {'scheduler': scheduler}")
    for name, value in stateful.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                kind = type(value).__name__
                raise BadArgument(f"stateful={{{name!r}: {kind}}}", f"it has no {method}()")


def _check_directory(path: object) -> None:
    """Check that checkpoints can be written, before the first one is due."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise BadArgument(f"checkpoint={path!r}", "the path of a directory, or None")
    if why := unusable(Path(path)):
        raise BadArgument(f"checkpoint={os.fspath(path)!r}", f"{why}; choose another directory")
