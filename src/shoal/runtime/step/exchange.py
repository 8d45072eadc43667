"""Exchange named tensors with the other workers, bucket by bucket, through a compressor.

An exchange has its numbers in flat buffers. ``flow(i)`` is the flow of bucket i. It yields asks, is
sent the answers, and replaces this worker's numbers by the average, in place. The engine runs flows
during backward. Modes without an engine run them at other times, and the lockstep trainer in tests.

Compressor states (residuals, momenta) belong to parameters, or to slices of parameters. When the
buckets change, `reslice_states` cuts the states for the new slices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from shoal.axes.compression import Compressor, Trait, Value
from shoal.axes.compression.kit.stopwatch import Stopwatch
from shoal.axes.scheduling import Cost, Layer, Schedule, Task
from shoal.errors import UsageError
from shoal.flow import Ask, Asks, Flow, Gather, Mean, Scatter, Spread, alone, together
from shoal.runtime.step.buffers import Bucket, FlatBuffers, real


def typical(nbytes: int) -> float:
    """Return the assumed seconds of a message on an unmeasured link: 100 us plus 1 ns a byte."""
    return 1e-4 + nbytes * 1e-9


class Exchange:
    """Averages the tensors in flat buffers over the workers, in place.

    Args:
        flat: the flat buffers.
        schedule: the schedule that plans the buckets.
        compressor: the compressor that encodes the messages.
        cost: a function from the bytes of a message to its seconds, for the plan.
    """

    def __init__(
        self, flat: FlatBuffers, schedule: Schedule, compressor: Compressor, cost: Cost = typical
    ) -> None:
        self.flat, self.compressor = flat, compressor
        self.schedule, self._cost = schedule, cost
        self.round = 0
        self.states: dict[str, Any] = {}
        self._previous: dict[str, Any] = {}
        self._halves: dict[tuple[str, ...], tuple[Flow, Tensor]] = {}
        self.moves = False  # whether the result is the mean minus this worker's own message
        self.factors: Mapping[str, tuple[Tensor, Tensor]] = {}
        self.stopwatch: Stopwatch | None = None  # for compressors that choose by time

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which their flows start."""
        return self.flat.bind(self.schedule, self._cost)

    def rebind(self, schedule: Schedule, measured: Mapping[str, Layer], cost: Cost) -> bool:
        """Plan the buckets again, between two rounds, and return whether they changed.

        ``measured`` has the measured layers by name, and ``cost`` the measured cost of a message.
        """

        def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
            return schedule.plan([measured.get(layer.name, layer) for layer in layers], cost)

        buckets = self.flat.bind(replace(schedule, plan=plan), cost)
        if [bucket.keys for bucket in buckets] == [bucket.keys for bucket in self.buckets]:
            return False
        self.buckets = buckets
        return True

    def flow(self, index: int) -> Asks:
        """Return the flow that averages one bucket over the workers, in place."""
        bucket = self.buckets[index]
        if bucket.task.phase == "scatter":
            yield from self._scatter(bucket)
        elif bucket.task.phase == "gather":
            yield from self._gather(bucket)
        elif Trait.ELEMENTWISE in self.compressor.traits:
            agreed = yield from self.compressor.flow(Value(bucket.whole), None, self.round)
            _put(agreed.mean, bucket.whole)
        else:
            yield from self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> Asks:
        """Run one flow for each piece of the bucket. The i-th asks of all flows become one ask."""
        flows = together(self._open(bucket, writes=not self.moves))
        stopwatch = self.stopwatch
        ends = yield from flows if stopwatch is None else stopwatch.timed(flows, bucket.keys)
        for key, piece, agreed in zip(bucket.keys, bucket.pieces, ends, strict=True):
            self._previous[key] = self.states[key]
            self.states[key] = agreed.state
            _put(agreed.mean - agreed.mine.dense() if self.moves else agreed.mean, piece)

    def _scatter(self, bucket: Bucket) -> Asks:
        """Run a reduce-scatter of the bucket, so that every rank gets the sum of its own part."""
        flow = self.compressor.flow(Value(bucket.whole), None, self.round)
        ask = next(flow)
        if not isinstance(ask, Mean):
            name = type(ask).__name__
            raise UsageError(f"{name} cannot be a reduce-scatter: use a compressor that sums")
        tensor = yield Scatter(ask.tensor)
        self._halves[bucket.keys] = flow, tensor

    def _gather(self, bucket: Bucket) -> Asks:
        """Run an all-gather of the parts that :meth:`_scatter` summed, and end its flow."""
        flow, tensor = self._halves.pop(bucket.keys)
        answer = yield Spread(tensor)
        try:
            flow.send(answer)
        except StopIteration as end:
            _put(end.value.mean, bucket.whole)

    def revert(self) -> None:
        """Restore the states from before the current round, which contained a NaN or inf."""
        self.states.update(self._previous)

    def flows(self) -> Asks:
        """Return the flow that averages all buckets one after the other, and ends the round."""
        for index in range(len(self.buckets)):
            yield from self.flow(index)
        self.end_round()

    def end_round(self) -> None:
        """Increment the round, and drop the copies of states that ``revert`` would restore."""
        self.round += 1
        self._previous.clear()

    def messages(self, names: Container[str] | None = None) -> dict[str, tuple[Tensor, ...]]:
        """Return the encoded pieces in ``names``, or all pieces, to push to a server, by key.

        The compressor must issue exactly one ask. The error of the encoding is kept in the
        compressor's state, if it has one.
        """
        messages: dict[str, tuple[Tensor, ...]] = {}
        for bucket in self.buckets:
            for key, flow in zip(bucket.keys, self._open(bucket, writes=False), strict=True):
                if names is not None and key not in names:
                    continue
                ask = next(flow)
                messages[key] = _parts(ask)
                try:
                    flow.send(alone(ask))
                except StopIteration as end:
                    self.states[key] = end.value.state
        self.round += 1
        return messages

    def _open(self, bucket: Bucket, *, writes: bool) -> list[Flow]:
        """Return a flow for each piece. With ``writes`` it may write the mean into the piece."""
        if not all(key in self.states for key in bucket.keys):
            self._reslice()
        values = [
            Value(piece, key, self.factors.get(key), out=piece if writes else None)
            for key, piece in zip(bucket.keys, bucket.pieces, strict=True)
        ]
        if self.stopwatch is not None:
            values = self.stopwatch.annotate(values)
        return [self.compressor.flow(v, self.states[v.name], self.round) for v in values]

    def _reslice(self) -> None:
        """Make a state for each piece of the buckets, from the existing states if there are any."""
        views = {name: real(view.view) for name, view in self.flat.views.items()}
        pieces = {k: p for b in self.buckets for k, p in zip(b.keys, b.pieces, strict=True)}
        self.states = reslice_states(self.states, pieces, views, self.compressor.init)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds, and the compressor's states by key."""
        states = {k: s for k, s in self.states.items() if s is not None}
        return {"round": self.round, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned. An empty dict resets rounds and states."""
        self.round = int(state.get("round", 0))
        self.states = dict(state.get("states", {}))


def _put(value: Tensor, into: Tensor) -> None:
    if value.data_ptr() != into.data_ptr():
        into.copy_(value)


def _parts(ask: Ask) -> tuple[Tensor, ...]:
    """Return the tensors that an ask sends. A `Mean` is copied, as it may be overwritten."""
    if isinstance(ask, Gather):
        return ask.parts
    if isinstance(ask, Mean):
        return (ask.tensor.clone(),)
    name = type(ask).__name__
    raise UsageError(f"{name} cannot be pushed to a server: use a compressor with one message")


_RANGE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.S)


class StateSlice(NamedTuple):
    """The compressor's state for elements ``start`` to ``stop`` of a parameter."""

    start: int
    stop: int
    state: Any


def reslice_states(
    states: Mapping[str, Any],
    pieces: Mapping[str, Tensor],
    views: Mapping[str, Tensor],
    init: Callable[[Value], Any],
) -> dict[str, Any]:
    """Return a state for each piece, from the states of other slices of the same parameters.

    Args:
        states: the old states by key. A key is ``name``, or ``name[start:stop]`` for a slice.
        pieces: the new pieces, by keys of the same form.
        views: a tensor with the shape and strides of each parameter, by name.
        init: a function that makes the first state of a piece.
    """
    slices: dict[str, list[StateSlice]] = {}
    for key, state in states.items():
        name, start, stop = span(key, views)
        slices.setdefault(name, []).append(StateSlice(start, stop, state))
    resliced = {}
    for key, piece in pieces.items():
        name, start, stop = span(key, views)
        fresh = init(Value(piece, key)) if key not in states else None
        overlapping = [s for s in slices.get(name, ()) if s.start < stop and start < s.stop]
        if key in states or not overlapping:
            resliced[key] = states.get(key, fresh)
        else:
            resliced[key] = _merge(StateSlice(start, stop, fresh), overlapping, views[name])
    return resliced


def span(key: str, views: Mapping[str, Tensor]) -> tuple[str, int, int]:
    """Return the parameter's name in a key, and the range (start, stop) of its elements."""
    ranged = None if key in views else _RANGE.fullmatch(key)
    if ranged is not None:
        return ranged[1], int(ranged[2]), int(ranged[3])
    return key, 0, views[key].numel() if key in views else 0


def _merge(fresh: StateSlice, old: list[StateSlice], view: Tensor) -> Any:
    """Return a new slice's state, with tensors merged and other values from the first old slice."""
    start, stop, state = fresh
    if isinstance(state, Tensor) and state.numel() == stop - start:
        into = _flatten(state, view).clone()
        for part in old:
            first, last = max(start, part.start), min(stop, part.stop)
            numbers = _flatten(part.state, view)[first - part.start : last - part.start]
            into[first - start : last - start] = numbers
        whole = state.shape == view.shape
        return into.as_strided(view.shape, view.stride()) if whole else into.view(state.shape)
    if isinstance(state, tuple | list):
        columns = zip(*(part.state for part in old), strict=True)
        items = [
            _merge(StateSlice(start, stop, item), _with_states(old, column), view)
            for item, column in zip(state, columns, strict=True)
        ]
        return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)
    if isinstance(state, dict):
        return {
            k: _merge(
                StateSlice(start, stop, v), _with_states(old, [p.state[k] for p in old]), view
            )
            for k, v in state.items()
        }
    first_old = old[0].state
    alike = getattr(first_old, "shape", None) == getattr(state, "shape", None)
    return first_old if type(first_old) is type(state) and alike else state


def _with_states(slices: list[StateSlice], states: Any) -> list[StateSlice]:
    return [s._replace(state=state) for s, state in zip(slices, states, strict=True)]


def _flatten(state: Tensor, view: Tensor) -> Tensor:
    """Return a flat state, with its elements in the parameter's order in memory."""
    if state.shape != view.shape or view.is_contiguous():
        return state.reshape(-1)
    flat = state.new_empty(state.numel())
    flat.as_strided(view.shape, view.stride()).copy_(state)
    return flat
