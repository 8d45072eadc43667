"""Push gradients to the servers and receive the model, without waiting for all workers."""

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
    """Asynchronous and stale-synchronous SGD: the servers update the model.

    This worker's optimizer updates nothing. At the end of the run, it gets the servers' state.
    """

    def __init__(self, setup: ModeSetup) -> None:
        super().__init__(setup)
        self.setup = setup
        self.server = cast(ServerWire, setup.carrier)  # the lockstep trainer has another wire
        self.exchange = setup.exchange()
        self.left = False  # whether this worker has copied the servers' state and left

    @property
    def equal_now(self) -> bool:
        """Whether all workers hold the same model, which they do after leaving the servers."""
        return self.left

    @property
    def shares_optimizer(self) -> bool:
        """True, because a checkpoint saves the servers' optimizer state for all workers."""
        return True

    def closing(self, apply: Apply) -> Asks:
        """Push the gradients, and copy the servers' model, which is the answer.

        A parameter without a gradient is not pushed, so that the servers' momentum does not change
        it. A step that is skipped sends an empty push, which still counts as a step of this worker.
        """
        self.setup.model_part.collect(self.exchange)
        used = {name for name, p in self.parameters.items() if p.grad is not None}
        model = yield Push(self.exchange.messages(used))
        with torch.no_grad():
            for name, value in model.items():
                self.parameters[name].copy_(value)
        for p in self.parameters.values():
            p.grad = None
        apply()  # it changes nothing, but schedulers check that the optimizer stepped

    def pull(self) -> Set[int]:
        """Copy the servers' model into this model. Return ``data_ptr()`` of changed tensors."""
        if self.left:
            return frozenset()
        return {t.data_ptr() for t in pull(self.server, self.setup.model_part).values()}

    def optimizer_state(self, own: State) -> State:
        """Return the servers' state with this worker's hyper-parameters, or ``own`` after leave."""
        return own if self.left else fetch_state(self.server, own)

    def load_remote(self, state: State) -> State:
        """Send model and optimizer state to the servers. All workers must call this together.

        Return the state to load here. Before ``leave`` it has no state of parameters.
        """
        if self.left:
            return state
        dist.barrier()  # wait until every worker has stopped pushing
        if self.setup.context.world.rank == 0:
            send_state(self.server, self.parameters, state)
        dist.barrier()
        return {**state, "state": {}}

    def leave(self) -> None:
        """Wait for the last push of every worker, then copy the servers' model and state."""
        if not self.left:
            wait_for_pushes(self.server, self.setup.context)
            take_over(self.server, self.setup.model_part, self.setup.optimizer)
            self.left = True
