"""Loggers for metrics: a protocol of one method, and adapters for three common services.

Anything with ``log(metrics, step)`` is a logger: pass it as ``distribute(..., logger=...)``. Only
the main worker logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shoal.errors import UsageError


class Logger(Protocol):
    """Receives metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one step."""


class TensorBoard:
    """Scalars for TensorBoard (``pip install shoal[tensorboard]``).

    Args:
        directory: where event files go.
    """

    def __init__(self, directory: str = "runs") -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(_missing("TensorBoard", "tensorboard")) from None
        self._writer = SummaryWriter(directory)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add scalars."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)


class WandB:
    """Weights & Biases (``pip install shoal[wandb]``).

    Args:
        settings: passed to ``wandb.init``.
    """

    def __init__(self, **settings: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise UsageError(_missing("WandB", "wandb")) from None
        self._run = wandb.init(**settings)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log to the run."""
        self._run.log(dict(metrics), step=step)


class MLflow:
    """MLflow tracking (``pip install shoal[mlflow]``).

    Args:
        settings: passed to ``mlflow.start_run``.
    """

    def __init__(self, **settings: Any) -> None:
        try:
            import mlflow
        except ImportError:
            raise UsageError(_missing("MLflow", "mlflow")) from None
        self._mlflow = mlflow
        mlflow.start_run(**settings)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log to the active run."""
        self._mlflow.log_metrics(dict(metrics), step=step)


def _missing(what: str, extra: str) -> str:
    return f"{what} is not installed: pip install 'shoal[{extra}]', or pass another logger"
