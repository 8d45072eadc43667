"""What one worker does in a step, as flows: one text for processes, lockstep and simulation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from shoal.flow import Ask
from shoal.runtime.step.exchange import Exchange

Asks: TypeAlias = Generator[Ask, Any, None]
Apply: TypeAlias = Callable[[], None]
"""Take one optimizer step with the gradients in place."""


class Mode(Protocol):
    """How a worker's steps and the others' come together."""

    @property
    def gradients(self) -> Exchange | None:
        """Agreed on before the update, task by task, while backward computes; or None."""

    @property
    def agrees(self) -> bool:
        """Whether all workers hold the same model after every step."""

    def opening(self) -> list[Asks]:
        """What may travel from the start of the step on."""

    def closing(self, apply: Apply) -> Asks:
        """The end of the step: update, and agree where it is due."""

    def due(self) -> bool:
        """Whether this step ends in an agreement of all."""

    def state_dict(self) -> dict[str, Any]:
        """Everything remembered between steps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where ``state_dict`` left off; of an empty state, begin from the model as is."""


Parameters: TypeAlias = Mapping[str, Tensor]
