"""Agree on named tensors, one task at a time: flows, and what they remember.

An agreement holds numbers in flat buffers. ``flow(i)`` is the generator of its i-th task: it asks,
is answered, and leaves the agreed numbers in the place of my own. Who drives it (an overlapping
engine, a lockstep harness, a simulator) is not its business.

What compression remembers follows its numbers into other messages.

Memory is kept by parameter, or by range of a parameter where it was cut. When messages change, the
parts of memory that are as large as what they belong to (residuals, momenta) are put together and
cut anew; whatever else is remembered (a count) is taken from the first piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from shoal.axes.compression import Compressor, Trait, Value
from shoal.axes.compression.kit.stopwatch import Stopwatch
from shoal.axes.scheduling import Cost, Layer, Schedule, Task
from shoal.errors import UsageError
from shoal.flow import Ask, Flow, Gather, Mean, Scatter, Spread, alone, together
from shoal.runtime.step.buffers import Bucket, FlatBuffers, real


def typical(nbytes: int) -> float:
    """Seconds of a message on a link nobody measured: 100 us and 1 GB/s."""
    return 1e-4 + nbytes * 1e-9


class Exchange:
    """What a set of tensors becomes when all workers have spoken.

    Args:
        flats: the numbers, mine before and agreed after.
        schedule: into which messages they are put.
        compressor: in what form these travel.
    """

    def __init__(
        self, flats: FlatBuffers, schedule: Schedule, compressor: Compressor, cost: Cost = typical
    ) -> None:
        self.flats = flats
        self.compressor = compressor
        self.schedule, self._cost = schedule, cost
        self.round = 0
        self.states: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._halves: dict[tuple[str, ...], tuple[Flow, Tensor]] = {}
        self.moves = False  # whether the places get what all said less what I said
        self.factors: Mapping[str, tuple[Tensor, Tensor]] = {}
        self.stopwatch: Stopwatch | None = None  # for compressors that go by what rounds take

    @cached_property
    def tasks(self) -> tuple[Bucket, ...]:
        """What travels together, in the order in which it leaves."""
        return self.flats.bind(self.schedule, self._cost)

    def rebind(self, schedule: Schedule, known: Mapping[str, Layer], cost: Cost) -> bool:
        """Put the numbers into other messages, between two rounds; whether they are others.

        What compression remembers follows its numbers.

        Args:
            schedule: plans the messages.
            known: what was measured of parameters, by name.
            cost: of a message, as measured.
        """

        def plan(layers: Sequence[Layer], cost: Cost) -> tuple[Task, ...]:
            return schedule.plan([known.get(layer.name, layer) for layer in layers], cost)

        tasks = self.flats.bind(replace(schedule, plan=plan), cost)
        if [b.keys for b in tasks] == [b.keys for b in self.tasks]:
            return False
        self.tasks = tasks
        return True

    def flow(self, index: int) -> Generator[Ask, Any, None]:
        """The i-th task, from my numbers to the agreed ones, in place."""
        task = self.tasks[index]
        if task.task.phase != "reduce":
            yield from self._scatter(task) if task.task.phase == "scatter" else self._gather(task)
            return
        if Trait.ELEMENTWISE in self.compressor.traits:
            agreed = yield from self.compressor.flow(Value(task.whole), None, self.round)
            _put(agreed.mean, task.whole)
            return
        opened = together(self._open(task, writes=not self.moves))
        watch = self.stopwatch
        ends = yield from opened if watch is None else watch.timed(opened, task.keys)
        for key, piece, agreed in zip(task.keys, task.pieces, ends, strict=True):
            self._before[key] = self.states[key]
            self.states[key] = agreed.state
            _put(agreed.mean - agreed.mine if self.moves else agreed.mean, piece)

    def _scatter(self, task: Bucket) -> Generator[Ask, Any, None]:
        """The first half of a sum; its flow waits for the other, under the range it is about."""
        flow = self.compressor.flow(Value(task.whole), None, self.round)
        ask = next(flow)
        if not isinstance(ask, Mean):
            raise UsageError(f"{type(ask).__name__} cannot be scattered: it is no sum")
        tensor = yield Scatter(ask.tensor)
        self._halves[task.keys] = flow, tensor

    def _gather(self, task: Bucket) -> Generator[Ask, Any, None]:
        flow, tensor = self._halves.pop(task.keys)
        answer = yield Spread(tensor)
        try:
            flow.send(answer)
        except StopIteration as end:
            _put(end.value.mean, task.whole)

    def revert(self) -> None:
        """Forget what the last round left behind: it held a NaN."""
        self.states.update(self._before)

    def flows(self) -> Generator[Ask, Any, None]:
        """All tasks, one after the other, and the end of the round."""
        for index in range(len(self.tasks)):
            yield from self.flow(index)
        self.end_round()

    def end_round(self) -> None:
        """All is agreed, and it will stand."""
        self.round += 1
        self._before.clear()

    def messages(self, names: Container[str] | None = None) -> dict[str, tuple[Tensor, ...]]:
        """What I would send of these parameters or all, with nobody's answer (for pushes).

        Of compressors with one ask. What is lost is remembered as if I had been alone.
        """
        sent: dict[str, tuple[Tensor, ...]] = {}
        for task in self.tasks:
            for key, flow in zip(task.keys, self._open(task, writes=False), strict=True):
                if names is not None and key not in names:
                    continue
                ask = next(flow)
                sent[key] = _parts(ask)
                try:
                    flow.send(alone(ask))
                except StopIteration as end:
                    self.states[key] = end.value.state
        self.round += 1
        return sent

    def _open(self, task: Bucket, *, writes: bool) -> list[Flow]:
        """A flow for each piece; one that ``writes`` may leave the mean in its place."""
        if not all(key in self.states for key in task.keys):
            self._recut()
        pairs = zip(task.keys, task.pieces, strict=True)
        values = [
            Value(piece, key, self.factors.get(key), out=piece if writes else None)
            for key, piece in pairs
        ]
        told = values if self.stopwatch is None else self.stopwatch.told(values)
        return [self.compressor.flow(v, self.states[v.name], self.round) for v in told]

    def _recut(self) -> None:
        """Memory that was kept for other messages, or that nobody has yet, in the cut of these."""
        views = {name: real(place.view) for name, place in self.flats.places.items()}
        pieces = {k: p for task in self.tasks for k, p in zip(task.keys, task.pieces, strict=True)}
        self.states = reslice_states(self.states, pieces, views, self.compressor.init)

    def state_dict(self) -> dict[str, Any]:
        """Rounds, and every state by parameter name."""
        kept = {k: s for k, s in self.states.items() if s is not None}
        return {"round": self.round, "states": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where ``state_dict`` left off; of an empty state, begin anew."""
        self.round = int(state.get("round", 0))
        self.states = dict(state.get("states", {}))


def _put(value: Tensor, into: Tensor) -> None:
    if value.data_ptr() != into.data_ptr():
        into.copy_(value)


def _parts(ask: Ask) -> tuple[Tensor, ...]:
    """What a single ask puts on the wire; a sum is copied, for wires may overwrite it."""
    if isinstance(ask, Gather):
        return ask.parts
    if isinstance(ask, Mean):
        return (ask.tensor.clone(),)
    raise UsageError(f"{type(ask).__name__} cannot be pushed: a server takes one message")


_RANGE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.S)


class Part(NamedTuple):
    """Memory of the numbers from ``start`` to ``stop`` of a parameter."""

    start: int
    stop: int
    memory: Any


def reslice_states(
    states: Mapping[str, Any],
    pieces: Mapping[str, Tensor],
    views: Mapping[str, Tensor],
    init: Callable[[Value], Any],
) -> dict[str, Any]:
    """Memory for each of these pieces, from that of others of the same parameters.

    Args:
        states: by ``name``, or ``name[start:stop]`` of a range.
        pieces: what is to be sent from now on, by such keys.
        views: every parameter whole, by name.
        init: the memory of what was never sent.
    """
    held: dict[str, list[Part]] = {}
    for key, memory in states.items():
        name, start, stop = span(key, views)
        held.setdefault(name, []).append(Part(start, stop, memory))
    made = {}
    for key, piece in pieces.items():
        name, start, stop = span(key, views)
        fresh = init(Value(piece, key)) if key not in states else None
        meets = [p for p in held.get(name, ()) if p.start < stop and start < p.stop]
        if key in states or not meets:
            made[key] = states.get(key, fresh)
        else:
            made[key] = _filled(Part(start, stop, fresh), meets, views[name])
    return made


def span(key: str, views: Mapping[str, Tensor]) -> tuple[str, int, int]:
    """The parameter that a key speaks of, and the range of its numbers."""
    ranged = None if key in views else _RANGE.fullmatch(key)
    if ranged is not None:
        return ranged[1], int(ranged[2]), int(ranged[3])
    return key, 0, views[key].numel() if key in views else 0


def _filled(fresh: Part, held: list[Part], view: Tensor) -> Any:
    """Fresh memory, with what others remember of the same numbers in it."""
    start, stop, memory = fresh
    if isinstance(memory, Tensor) and memory.numel() == stop - start:
        into = _flat(memory, view).clone()
        for part in held:
            first, last = max(start, part.start), min(stop, part.stop)
            told = _flat(part.memory, view)[first - part.start : last - part.start]
            into[first - start : last - start] = told
        whole = memory.shape == view.shape
        return into.as_strided(view.shape, view.stride()) if whole else into.view(memory.shape)
    if isinstance(memory, tuple | list):
        columns = zip(*(part.memory for part in held), strict=True)
        items = [
            _filled(Part(start, stop, item), _each(held, column), view)
            for item, column in zip(memory, columns, strict=True)
        ]
        named = hasattr(memory, "_fields")
        return type(memory)(*items) if named else type(memory)(items)
    if isinstance(memory, dict):
        return {
            k: _filled(Part(start, stop, v), _each(held, [p.memory[k] for p in held]), view)
            for k, v in memory.items()
        }
    kept = held[0].memory
    alike = getattr(kept, "shape", None) == getattr(memory, "shape", None)
    return kept if type(kept) is type(memory) and alike else memory


def _each(held: list[Part], memories: Any) -> list[Part]:
    return [p._replace(memory=memory) for p, memory in zip(held, memories, strict=True)]


def _flat(memory: Tensor, view: Tensor) -> Tensor:
    """Its numbers in the order in which those of the parameter lie in memory."""
    if memory.shape != view.shape or view.is_contiguous():
        return memory.reshape(-1)
    flat = memory.new_empty(memory.numel())
    flat.as_strided(view.shape, view.stride()).copy_(memory)
    return flat
