"""Loggers for metrics: a protocol with one method, and adapters for three common tools.

Any object with a method ``log(metrics, step)`` is a logger. Pass it as
``distribute(..., logger=...)``. Only the main worker calls ``log``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from shoal.errors import UsageError


class Logger(Protocol):
    """The protocol of an object that receives metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one step."""


class TensorBoard:
    """Writes scalars for TensorBoard to a directory (``pip install shoal[tensorboard]``)."""

    def __init__(self, directory: str = "runs") -> None:
        module = _imported("torch.utils.tensorboard", "TensorBoard", "tensorboard")
        self._writer = module.SummaryWriter(directory)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write each metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)


class WandB:
    """Logs to Weights & Biases (``pip install shoal[wandb]``); calls ``wandb.init(**settings)``."""

    def __init__(self, **settings: Any) -> None:
        self._run = _imported("wandb", "WandB", "wandb").init(**settings)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics to the run that ``wandb.init`` returned."""
        self._run.log(dict(metrics), step=step)


class MLflow:
    """Logs to MLflow (``pip install shoal[mlflow]``); calls ``mlflow.start_run(**settings)``."""

    def __init__(self, **settings: Any) -> None:
        self._mlflow = _imported("mlflow", "MLflow", "mlflow")
        self._mlflow.start_run(**settings)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics to MLflow's active run."""
        self._mlflow.log_metrics(dict(metrics), step=step)


def _imported(module: str, name: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        install = f"run pip install 'shoal[{extra}]', or pass another logger"
        raise UsageError(f"{name} is not installed; {install}") from None
