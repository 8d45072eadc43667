"""One flat buffer for each dtype and device, with a shaped view for each tensor.

Tensors are stored in the order in which backward reaches them (last layer first). So the tensors of
one bucket are one contiguous range, which is sent and received without a copy:

    flat buffer   | layer 3 | layer 2 | layer 1 | tail (step reports) |
    buckets       |<- bucket 0 ------>|<- bucket 1 ------------------>|

With the shoal backend the memory may be shared with the other ranks of the host, because that
backend reduces tensors in shared memory without copying them.
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
from shoal.axes.scheduling import Cost, Layer, Schedule, Task
from shoal.strategy import Strategy
from shoal.wire.shm import allocate

Kind: TypeAlias = tuple[torch.dtype, torch.device]
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]
"""``(numel, dtype, device)`` -> a flat tensor of zeros."""


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat tensor of zeros in memory that only this process can access."""
    return torch.zeros(numel, dtype=dtype, device=device)


class ParamView(NamedTuple):
    """Where one tensor is stored, and a view of it."""

    kind: Kind  # dtype and device of its flat buffer
    start: int  # index of its first element in the buffer
    numel: int  # a complex number counts as two elements
    view: Tensor  # has the shape of the tensor, and its strides if the tensor is dense


class Bucket(NamedTuple):
    """A task of a schedule (one message), and the memory that it sends."""

    task: Task
    names: tuple[str, ...]  # the parameter of each piece
    # The key of each piece's compressor state is "name", or "name[start:stop]" for a slice.
    keys: tuple[str, ...]
    pieces: tuple[Tensor, ...]  # a shaped view of a whole parameter, a flat view of a slice
    whole: Tensor  # all pieces as one flat view, with the tail in the last bucket


class FlatBuffers:
    """Flat buffers for named tensors, stored in backward order.

    Args:
        tensors: the tensors by name, in forward order. Their values are not used.
        tail: how many extra numbers to store behind the last tensor and to send with the last
            bucket. It must be 0 unless all tensors have one dtype and device.
        allocate: the function that allocates the memory.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, tail: int = 0, allocate: Allocate = zeros
    ) -> None:
        self.names, self._tensors = tuple(tensors), dict(tensors)
        self._tail, self._allocate = tail, allocate

    @cached_property
    def storage(self) -> dict[Kind, Tensor]:
        """The buffers by dtype and device. They are allocated at first use."""
        sizes: dict[Kind, int] = {}
        for kind, numel in map(_extent, self._tensors.values()):
            sizes[kind] = sizes.get(kind, self._tail) + numel
        return {
            (dtype, device): self._allocate(numel, dtype.to_real(), device)
            for (dtype, device), numel in sizes.items()
        }

    @cached_property
    def views(self) -> dict[str, ParamView]:
        """Where each tensor is stored, by name."""
        views: dict[str, ParamView] = {}
        ends = dict.fromkeys(self.storage, 0)
        for name in reversed(self.names):
            tensor = self._tensors[name]
            kind, numel = _extent(tensor)
            start, ends[kind] = ends[kind], ends[kind] + numel
            views[name] = ParamView(kind, start, numel, _view(self.storage[kind], start, tensor))
        return views

    @property
    def tail(self) -> Tensor:
        """A view of the numbers behind the last tensor."""
        if not self._tail:
            return torch.empty(0)
        (buffer,) = self.storage.values()
        return buffer[buffer.numel() - self._tail :]

    @property
    def nbytes(self) -> int:
        """The number of bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.storage.values())

    def bind(self, schedule: Schedule, cost: Cost) -> tuple[Bucket, ...]:
        """Return the buckets that a schedule plans, in the order of the plan.

        The plans of several buffers are merged by the layer whose backward completes a bucket.
        The order is the same on every rank, because it depends only on shapes and costs.
        """
        plans = []
        for kind in self.storage:
            names = [n for n in self.names if self.views[n].kind == kind]
            layers = [self._layer(n) for n in names]
            plans.append([self._bind(task, names) for task in schedule.plan(layers, cost)])
        if self._tail:
            (bound,) = plans
            (buffer,) = self.storage.values()
            start = bound[-1].whole.storage_offset() - buffer.storage_offset()
            bound[-1] = bound[-1]._replace(whole=buffer[start:])
        index = {name: i for i, name in enumerate(self.names)}
        # Merge by the layer that completes a bucket. The buckets of a buffer stay in plan order.
        return tuple(merge(*plans, key=lambda b: -min(index[n] for n in b.names)))

    def _layer(self, name: str) -> Layer:
        place = self.views[name]
        nbytes = place.numel * self.storage[place.kind].element_size()
        # No times are measured here. Assume 1 s per GB in forward, and twice that in backward,
        # which computes two matrix products instead of one.
        return Layer(name, nbytes, nbytes * 1e-9, nbytes * 2e-9)

    def _bind(self, task: Task, names: Sequence[str]) -> Bucket:
        used = tuple(names[piece.layer] for piece in task.slices)
        flat = self.storage[self.views[used[0]].kind]
        size = flat.element_size()
        pieces, keys, starts, stops = [], [], [], []
        for name, piece in zip(used, task.slices, strict=True):
            place, first, last = self.views[name], piece.start // size, piece.stop // size
            start, stop = place.start + first, place.start + last
            complete = last - first == place.numel
            pieces.append(real(place.view) if complete else flat[start:stop])
            keys.append(name if complete else f"{name}[{first}:{last}]")
            starts.append(start)
            stops.append(stop)
        if max(stops) - min(starts) != sum(stops) - sum(starts):
            raise ValueError(f"the slices of {task} are not one range of their buffer")
        return Bucket(task, used, tuple(keys), tuple(pieces), flat[min(starts) : max(stops)])


def real(tensor: Tensor) -> Tensor:
    """Return a real view of a complex tensor, for compressors. Return other tensors as is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _extent(tensor: Tensor) -> tuple[Kind, int]:
    """Return the key of a tensor's buffer, and the tensor's number of real elements."""
    numel = 2 * tensor.numel() if tensor.is_complex() else tensor.numel()
    return (tensor.dtype, tensor.device), numel


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a view of the buffer with the shape of ``like``, and its strides if it is dense."""
    if like.is_complex():
        return torch.view_as_complex(buffer[start : start + 2 * like.numel()].view(*like.shape, 2))
    flat = buffer[start : start + like.numel()]
    if like.is_contiguous() or not _dense(like):
        return flat.view(like.shape)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def _dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one memory block, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def allocator(strategy: Strategy, group: dist.ProcessGroup | None, *, workers: int) -> Allocate:
    """Return the function that allocates the flat buffers of a strategy.

    CPU memory may be shared if the backend's own all-reduce sums the buffers uncompressed. Then all
    workers of the group must allocate in the same order.
    """
    traits = strategy.compression.traits
    exact = Trait.LOSSLESS in traits and Trait.ELEMENTWISE in traits
    summed = strategy.coordination.via == "collective" and strategy.collectives.is_native
    if workers == 1 or not dist.is_initialized() or not (exact and summed):
        return zeros

    def shared(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        on_cpu = device.type == "cpu"
        return allocate(numel, dtype, group) if on_cpu else zeros(numel, dtype, device)

    return shared
