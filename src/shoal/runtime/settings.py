"""What a run is told besides its strategy."""

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
from shoal.runtime.world import env as contract


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
    """How a run goes about its steps.

    Args:
        accumulate: micro-batches a step; their gradients add up before the exchange.
        clip: largest global norm of the agreed gradient (after decompression, before the update).
        nonfinite: what a NaN or inf does. "stop" (default) checks the loss every step, and the
            gradient where ``clip`` is set, and ends the run; "skip" checks both, every step, and
            all workers leave the step out. Early updates (priority) look at losses only.
        backend: gloo, nccl or shoal (CPU, inside a host); None: the first that serves of nccl,
            shoal where all workers share a host, and gloo.
        timeout: seconds an exchange may take before it is given up and the missing rank named.
        checkpoint: directory that receives a checkpoint every ``every`` steps, and at the end.
        every: steps between them.
        keep: how many checkpoints stay.
        timeline: record spans.
        logger: receives ``log(metrics, step)`` on the main worker.
        stateful: what else to save and restore, by name: schedulers, averages, anything with
            ``state_dict`` and ``load_state_dict``.
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
            if value is not None and not _positive(value):
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
        """From keyword arguments; an unknown one is refused with the nearest names.

        The command line (``--checkpoint``) wins over the script.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownName("option of distribute", name, known)
        directory = environ.get(contract.CHECKPOINT)
        return cls(**{**options, "checkpoint": directory} if directory else options)


def _check_stateful(given: object) -> None:
    if not isinstance(given, Mapping):
        raise BadArgument(f"stateful={given!r}", "a dict: {'scheduler': scheduler}")
    for name, held in given.items():
        for verb in ("state_dict", "load_state_dict"):
            if not callable(getattr(held, verb, None)):
                raise BadArgument(
                    f"stateful={{{name!r}: {type(held).__name__}}}", f"it has no {verb}()"
                )


def _positive(value: object) -> bool:
    return is_number(value) and 0 < value < math.inf


def _check_directory(given: object) -> None:
    """Now, rather than when the first checkpoint is due."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise BadArgument(f"checkpoint={given!r}", "the path of a directory, or None")
    if why := unusable(Path(given)):
        raise BadArgument(f"checkpoint={os.fspath(given)!r}", f"{why}; choose another directory")
