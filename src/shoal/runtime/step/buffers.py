"""Where the numbers of a message live: one flat buffer a type, and shaped views into it.

Tensors lie in the order in which backward meets them (last layer first), so that the tensors of one
task are one contiguous range: a message needs no copy, neither before nor after.

Where the memory of messages comes from: shared with the other ranks of the host, if that helps.

The shoal backend combines tensors that lie in shared memory without copying them. It pays where the
flat range itself is what travels: numbers as they are, summed by the backend's own all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from heapq import merge
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.axes.compression import Trait
from shoal.axes.scheduling import Cost, Layer, Schedule, Slice, Task
from shoal.strategy import Strategy
from shoal.wire.shm import allocate

Kind: TypeAlias = tuple[torch.dtype, torch.device]
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]
"""``(numel, dtype, device)`` -> a flat tensor of zeros."""


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of this process alone."""
    return torch.zeros(numel, dtype=dtype, device=device)


class ParamView(NamedTuple):
    """Where one tensor lies: which flat buffer, from which element, and how it looks."""

    kind: Kind
    start: int
    numel: int  # real numbers: a complex number counts twice
    view: Tensor  # shaped and strided as the tensor it stands for


class Bucket(NamedTuple):
    """A task of a schedule, bound to memory."""

    task: Task
    names: tuple[str, ...]
    keys: tuple[str, ...]  # of axis state: the parameter's name, and the range if it was cut
    pieces: tuple[Tensor, ...]  # shaped views of real numbers, or flat ones of a slice
    whole: Tensor  # the same numbers as one flat range


class FlatBuffers:
    """Flat buffers that hold a copy of named tensors' shapes, in backward order.

    Args:
        tensors: what to make room for, in forward order.
        tail: numbers that travel behind the last tensor, in the last task; for tensors of one
            type only.
        allocate: where the memory comes from.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, tail: int = 0, allocate: Allocate = zeros
    ) -> None:
        self.names = tuple(tensors)
        self._allocate = allocate
        self._tensors = dict(tensors)
        self._tail = tail

    @cached_property
    def buffers(self) -> dict[Kind, Tensor]:
        """Memory by kind of number, taken when somebody first asks: one worker never does."""
        sizes: dict[Kind, int] = {}
        for kind, numel in map(_extent, self._tensors.values()):
            sizes[kind] = sizes.get(kind, self._tail) + numel
        return {
            (dtype, device): self._allocate(
                n, dtype.to_real() if dtype.is_complex else dtype, device
            )
            for (dtype, device), n in sizes.items()
        }

    @cached_property
    def places(self) -> dict[str, ParamView]:
        """Where each tensor lies, by name."""
        places: dict[str, ParamView] = {}
        ends = dict.fromkeys(self.buffers, 0)
        for name in reversed(self.names):
            tensor = self._tensors[name]
            kind, numel = _extent(tensor)
            start, ends[kind] = ends[kind], ends[kind] + numel
            places[name] = ParamView(kind, start, numel, _view(self.buffers[kind], start, tensor))
        return places

    @property
    def has_tail(self) -> bool:
        """Whether numbers travel behind the last tensor."""
        return self._tail > 0

    @property
    def tail(self) -> Tensor:
        """The numbers behind the last tensor."""
        if not self._tail:
            return torch.empty(0)
        (buffer,) = self.buffers.values()
        return buffer[buffer.numel() - self._tail :]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(b.numel() * b.element_size() for b in self.buffers.values())

    def bind(self, schedule: Schedule, cost: Cost) -> tuple[Bucket, ...]:
        """Plan the tasks of each type apart, then order them as backward makes them ready.

        The order is the same on every rank: it depends on shapes and costs only.
        """
        plans = []
        for kind in self.buffers:
            names = [n for n in self.names if self.places[n].kind == kind]
            layers = [self._layer(n) for n in names]
            plans.append([self._bind(task, names) for task in schedule.plan(layers, cost)])
        if self._tail:
            (bound,) = plans
            (buffer,) = self.buffers.values()
            start = bound[-1].whole.storage_offset() - buffer.storage_offset()
            bound[-1] = bound[-1]._replace(whole=buffer[start:])
        index = {name: i for i, name in enumerate(self.names)}
        # Merged by what is ready first; inside a type the plan's own order stands.
        return tuple(merge(*plans, key=lambda b: -min(index[n] for n in b.names)))

    def _layer(self, name: str) -> Layer:
        place = self.places[name]
        nbytes = place.numel * self.buffers[place.kind].element_size()
        # Nobody measured: a second a GB forward, and backward computes two products, not one. Only
        # the proportions matter, for an order of messages.
        return Layer(name, nbytes, nbytes * 1e-9, nbytes * 2e-9)

    def _bind(self, task: Task, names: Sequence[str]) -> Bucket:
        cuts = [self._cut(names[s.layer], s) for s in task.slices]
        starts, stops = [a for _, a, _ in cuts], [b for _, _, b in cuts]
        first, last = min(starts), max(stops)
        if last - first != sum(b - a for _, a, b in cuts):
            raise ValueError(f"task {task} is not one range of its buffer")
        flat = self.buffers[self.places[cuts[0][0]].kind]
        pieces, keys = [], []
        for name, start, stop in cuts:
            place = self.places[name]
            complete = stop - start == place.numel
            pieces.append(real(place.view) if complete else flat[start:stop])
            keys.append(name if complete else f"{name}[{start - place.start}:{stop - place.start}]")
        used = tuple(name for name, _, _ in cuts)
        return Bucket(task, used, tuple(keys), tuple(pieces), flat[first:last])

    def _cut(self, name: str, piece: Slice) -> tuple[str, int, int]:
        place = self.places[name]
        size = self.buffers[place.kind].element_size()
        return name, place.start + piece.start // size, place.start + piece.stop // size


def real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers: compressors know no others."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _extent(tensor: Tensor) -> tuple[Kind, int]:
    """Its buffer, and its real numbers; complex ones lie apart, for they must start evenly."""
    numel = 2 * tensor.numel() if tensor.is_complex() else tensor.numel()
    return (tensor.dtype, tensor.device), numel


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """A view shaped as ``like``, with its strides where those are dense."""
    if like.is_complex():
        real = buffer[start : start + 2 * like.numel()].view(*like.shape, 2)
        return torch.view_as_complex(real)
    flat = buffer[start : start + like.numel()]
    if like.is_contiguous() or not _dense(like):
        return flat.view(like.shape)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def _dense(tensor: Tensor) -> bool:
    """Whether the strides visit every element of one block once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def allocator(strategy: Strategy, group: dist.ProcessGroup | None, *, workers: int) -> Allocate:
    """How to take memory for what a strategy sends.

    Args:
        strategy: what is sent, and how.
        group: who agrees; None is everybody.
        workers: how many they are; all must take memory in the same order.
    """
    traits = strategy.compression.traits
    as_it_is = Trait.LOSSLESS in traits and Trait.ELEMENTWISE in traits
    summed = strategy.coordination.via == "collective" and strategy.collectives.is_native
    if workers == 1 or not (as_it_is and summed):
        return zeros

    def shared(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return zeros(numel, dtype, device)
        return allocate(numel, dtype, group)

    return shared
