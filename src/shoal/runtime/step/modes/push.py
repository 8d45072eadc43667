"""Push a gradient to the servers and pull their model; wait for no other worker."""

from __future__ import annotations

from collections.abc import Set
from typing import cast

import torch
import torch.distributed as dist

from shoal.flow import Asks, Push
from shoal.runtime.remote.client import fetch_state, pull, send_state, take_over, wait_for_pushes
from shoal.runtime.step.modes.mode import Apply, Mode, ModeSetup, State
from shoal.wire.server import ServerWire


class PushMode(Mode):
    """Asynchronous and stale-synchronous SGD: servers hold the model and the optimizer.

    This worker's own optimizer never steps, until the run ends and it takes the servers' state.
    """

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        self.setup = setup
        self.server = cast(ServerWire, setup.carrier)  # only in a run, not in the lockstep trainer
        self.exchange = setup.exchange()
        self.left = False  # this worker has left the servers, with a copy of their state

    @property
    def equal_now(self) -> bool:
        """Whether all workers hold the same model at this moment: once they have left."""
        return self.left

    @property
    def shares_optimizer(self) -> bool:
        """Whether one optimizer state serves all workers: the servers'."""
        return True

    def closing(self, apply: Apply) -> Asks:
        """Push the gradients, and copy the model that the servers answer with.

        A parameter without a gradient is not pushed: the servers' momentum must not move it. A
        skipped step pushes nothing, but still advances this worker's clock.
        """
        self.setup.model_part.collect(self.exchange)
        used = {name for name, p in self.parameters.items() if p.grad is not None}
        model = yield Push(self.exchange.messages(used))
        with torch.no_grad():
            for name, value in model.items():
                self.parameters[name].copy_(value)
        for p in self.parameters.values():
            p.grad = None
        apply()  # without gradients: learning-rate schedulers check that the optimizer stepped

    def pull(self) -> Set[int]:
        """Copy the servers' model into this one; return the addresses that were written."""
        if self.left:
            return frozenset()
        return {t.data_ptr() for t in pull(self.server, self.setup.model_part).values()}

    def optimizer_state(self, own: State) -> State:
        """Return the servers' optimizer state, with this worker's hyper-parameters."""
        return own if self.left else fetch_state(self.server, own)

    def load_remote(self, state: State) -> State:
        """Give model and optimizer state to the servers; the state to load here is empty."""
        if self.left:
            return state
        dist.barrier()  # every worker has stopped pushing
        if self.setup.context.world.rank == 0:
            send_state(self.server, self.parameters, state)
        dist.barrier()
        return {**state, "state": {}}

    def leave(self) -> None:
        """Wait for the last push of every worker, then copy the servers' state."""
        if not self.left:
            wait_for_pushes(self.server, self.setup.context)
            take_over(self.server, self.setup.model_part, self.setup.optimizer)
            self.left = True
