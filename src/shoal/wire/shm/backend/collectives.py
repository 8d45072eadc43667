"""Collectives that combine numbers: all_reduce, reduce, reduce_scatter and their other forms.

Collectives that only move bytes: broadcast, gather, scatter, all_to_all, in all their forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import BadArgument
from shoal.wire.shm.backend.surface import Base, Options, title
from shoal.wire.shm.backend.work import Task, Work
from shoal.wire.shm.memory.barrier import entitled
from shoal.wire.shm.memory.reduce_ops import Reduction, flatten, reduction, restore, same, writable
from shoal.wire.shm.node.rounds import Extent

_SUM = hash(dist.ReduceOp.SUM)


def _kind(opts: Options) -> int:
    """The hash of the operation, which torch also passes itself."""
    return _SUM if opts is None else hash(getattr(opts, "reduceOp", opts))


def _how(opts: Options, dtype: torch.dtype) -> Reduction:
    return reduction(_kind(opts), dtype)


@lru_cache(maxsize=1024)
def _all_reduced(kind: int, dtype: torch.dtype, numel: int) -> tuple[bytes, Reduction]:
    how = reduction(kind, dtype)
    return title(f"all_reduce ({how.name})", dtype, numel), how


def _each(tasks: Sequence[Task]) -> None:
    for task in tasks:
        task()


class Reducing(Base):
    """The collectives that combine numbers."""

    def allreduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: Options = None, timeout: object = None
    ) -> Work:
        """Leave everyone's numbers, combined, in the tensors of everyone."""
        wanted = [tensors] if isinstance(tensors, Tensor) else tensors
        if len(wanted) == 1:
            return self._do(self._allreduce(wanted[0], opts), wanted, opts)
        tasks = [self._allreduce(tensor, opts) for tensor in wanted]
        return self._do(partial(_each, tasks), wanted, opts)

    def _allreduce(self, tensor: Tensor, opts: Options) -> Task:
        flat = writable(tensor, "all_reduce")
        name, how = _all_reduced(_kind(opts), flat.dtype, flat.numel())
        if flat is tensor:
            return partial(self._wire.all_reduce, name, flat, how)

        def task() -> None:
            self._wire.all_reduce(name, flat, how)
            restore(tensor, flat)

        return task

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Options) -> Work:
        """Leave everyone's numbers, combined, in the tensor of one rank."""
        (tensor,) = tensors
        how, flat, root = _how(opts, tensor.dtype), writable(tensor, "reduce"), opts.rootRank
        name = title(f"reduce ({how.name}) to {root}", flat.dtype, flat.numel())

        def task() -> None:
            self._wire.reduce(name, flat, how, root=root)
            if self.rank() == root:
                restore(tensor, flat)

        return self._do(task, tensors, opts)

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor] | Tensor,
        inputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        opts: Options = None,
    ) -> Work:
        """Combine everyone's lists; each rank keeps the item of its own number."""
        output = outputs if isinstance(outputs, Tensor) else outputs[0]
        pieces = [inputs[0]] if isinstance(inputs[0], Tensor) else list(inputs[0])
        if len(pieces) != self.size():
            raise BadArgument(
                f"reduce_scatter of {len(pieces)} tensors", f"there are {self.size()} ranks"
            )
        same(pieces, output, numel=output.numel(), call="reduce_scatter")
        flats = [flatten(piece, "reduce_scatter") for piece in pieces]
        addresses = [flat.data_ptr() for flat in flats]
        return self._reduce_scatter(output, addresses, flats[self.rank()], opts, keep=flats)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        """Combine everyone's tensors; each rank keeps the part of its own number."""
        same([input], output, numel=output.numel() * self.size(), call="reduce_scatter_tensor")
        whole = flatten(input, "reduce_scatter_tensor")
        base, nbytes, numel = whole.data_ptr(), output.nbytes, output.numel()
        addresses = [base + rank * nbytes for rank in range(self.size())]
        mine = whole[self.rank() * numel : (self.rank() + 1) * numel]
        return self._reduce_scatter(output, addresses, mine, opts, keep=whole)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        """Several flat reduce_scatters, one after the other."""
        if not outputs:
            return Work([], done=True)
        pairs = zip(outputs, inputs, strict=True)
        works = [self._reduce_scatter_base(output, input, opts) for output, input in pairs]
        return works[-1]

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(
        self, output: Tensor, sources: Sequence[int], mine: Tensor, opts: Options, *, keep: object
    ) -> Work:
        """Combine pieces given by address; ``keep`` is held until they have been read."""
        how, out = _how(opts, output.dtype), writable(output, "reduce_scatter")
        name = title(f"reduce_scatter ({how.name})", out.dtype, out.numel())

        def task(held: object = keep) -> None:
            self._wire.reduce_scatter(name, sources, mine=mine, out=out, how=how)
            restore(output, out)

        return self._do(task, [output], opts)


class Gathering(Base):
    """The collectives in which every rank gives one part."""

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Options = None,
    ) -> Work:
        """Everyone's tensor, in a list, on every rank."""
        if not inputs:
            return Work([], done=True)
        works = [
            self._gather(list(targets), source, opts, root=None)
            for targets, source in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    allgather_coalesced = allgather

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Options,
    ) -> Work:
        """Everyone's tensor, in a list, on one rank."""
        targets = list(outputs[0]) if outputs else []
        return self._gather(targets, inputs[0], opts, root=opts.rootRank)

    def _gather(
        self, targets: list[Tensor], source: Tensor, opts: Options, *, root: int | None
    ) -> Work:
        call = "all_gather" if root is None else f"gather to {root}"
        reads = root is None or root == self.rank()
        if reads and len(targets) != self.size():
            raise BadArgument(f"{call} into {len(targets)} tensors", f"of {self.size()} ranks")
        same(targets, source, numel=source.numel(), call=call)
        flat, flats = flatten(source, call), [writable(target, call) for target in targets]
        name = title(call, flat.dtype, flat.numel())
        addresses = [target.data_ptr() for target in flats] if reads else None

        def task() -> None:
            self._wire.all_gather(name, flat.data_ptr(), nbytes=flat.nbytes, targets=addresses)
            for target, got in zip(targets, flats, strict=True):
                restore(target, got)

        return self._do(task, targets, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        """Everyone's tensor, one after the other in one tensor, on every rank."""
        same([output], input, numel=input.numel() * self.size(), call="all_gather_into_tensor")
        flat, out = flatten(input, "all_gather"), writable(output, "all_gather")
        name = title("all_gather", flat.dtype, flat.numel())
        base, nbytes = out.data_ptr(), flat.nbytes
        addresses = [base + rank * nbytes for rank in range(self.size())]

        def task() -> None:
            self._wire.all_gather(name, flat.data_ptr(), nbytes=nbytes, targets=addresses)
            restore(output, out)

        return self._do(task, [output], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        """Several flat all_gathers, one after the other."""
        if not outputs:
            return Work([], done=True)
        pairs = zip(outputs, inputs, strict=True)
        return [self._allgather_base(output, input, opts) for output, input in pairs][-1]

    all_gather_single_coalesced = allgather_into_tensor_coalesced


class Scattering(Base):
    """The collectives in which ranks get different or equal parts of what some rank gives."""

    def broadcast(self, tensors: Sequence[Tensor] | Tensor, opts: Any, *rest: Any) -> Work:
        """One rank's tensors, on every rank."""
        wanted = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        read = flatten if self.rank() == root else writable
        flats = [read(tensor, "broadcast") for tensor in wanted]
        names = [title(f"broadcast from {root}", flat.dtype, flat.numel()) for flat in flats]

        def task() -> None:
            for name, tensor, flat in zip(names, wanted, flats, strict=True):
                self._wire.broadcast(name, flat.data_ptr(), flat.nbytes, root=root)
                if self.rank() != root:
                    restore(tensor, flat)

        return self._do(task, wanted, None if isinstance(opts, int) else opts)

    def scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Options,
    ) -> Work:
        """One rank's list, an item for each rank."""
        root, output = opts.rootRank, outputs[0]
        pieces = list(inputs[0]) if inputs and self.rank() == root else []
        if self.rank() == root and len(pieces) != self.size():
            raise BadArgument(f"scatter of {len(pieces)} tensors", f"to {self.size()} ranks")
        same(pieces, output, numel=output.numel(), call="scatter")
        flats, out = [flatten(piece, "scatter") for piece in pieces], writable(output, "scatter")
        name = title(f"scatter from {root}", out.dtype, out.numel())
        sources = [flat.data_ptr() for flat in flats]

        def task() -> None:
            self._wire.scatter(name, sources, nbytes=out.nbytes, target=out.data_ptr(), root=root)
            flats.clear()
            restore(output, out)

        return self._do(task, outputs, opts)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        """From each rank a list with a tensor for each rank; to each rank likewise."""
        if len(outputs) != self.size() or len(inputs) != self.size():
            raise BadArgument(
                f"all_to_all of {len(inputs)} into {len(outputs)} tensors", f"{self.size()} ranks"
            )
        sources = [flatten(tensor, "all_to_all") for tensor in inputs]
        targets = [writable(tensor, "all_to_all") for tensor in outputs]
        name = entitled(f"all_to_all of {sources[0].dtype}")

        def task() -> None:
            self._wire.all_to_all(name, _extents(sources), _extents(targets))
            for tensor, flat in zip(outputs, targets, strict=True):
                restore(tensor, flat)

        return self._do(task, outputs, opts)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Options = None,
    ) -> Work:
        """From each rank a tensor cut in parts, one for each rank; to each rank likewise."""
        source, target = flatten(input, "all_to_all"), writable(output, "all_to_all")
        sources = _parts(source, self._rows(input, input_split_sizes))
        targets = _parts(target, self._rows(output, output_split_sizes))
        name = entitled(f"all_to_all of {source.dtype}")

        def task() -> None:
            self._wire.all_to_all(name, sources, targets)
            source.data_ptr()  # it has been needed until here
            restore(output, target)

        return self._do(task, [output], opts)

    all_to_all_single = alltoall_base

    def _rows(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Rows in each part: equally many, or as many as told."""
        rows = tensor.shape[0] if tensor.dim() else 1
        told = list(splits) or [rows // self.size()] * self.size()
        if sum(told) != rows or len(told) != self.size():
            raise BadArgument(
                f"all_to_all_single of {rows} rows in parts {told}",
                f"one part for each of {self.size()} ranks, together all rows",
            )
        return told

    def barrier(self, opts: Options = None, timeout: timedelta | None = None) -> Work:
        """Wait for everyone."""
        name = entitled("barrier")
        return self._do(lambda: self._wire.barrier(name), [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for everyone, and name those who did not come within ``timeout``; always all."""
        name, board = entitled("monitored_barrier"), self._board
        usual = board.seconds

        def task() -> None:
            try:
                board.seconds = timeout.total_seconds() if timeout else usual
                self._wire.barrier(name)
            finally:
                board.seconds = usual

        self._do(task, []).wait()


def _parts(flat: Tensor, rows: Sequence[int]) -> list[Extent]:
    """The address and bytes of each part, which has so many rows."""
    total = sum(rows)
    width, address, parts = flat.nbytes // total if total else 0, flat.data_ptr(), []
    for count in rows:
        parts.append((address, count * width))
        address += count * width
    return parts


def _extents(flats: Sequence[Tensor]) -> list[Extent]:
    """The address and bytes of each."""
    return [(flat.data_ptr(), flat.nbytes) for flat in flats]
