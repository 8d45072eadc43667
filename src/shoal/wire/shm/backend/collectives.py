"""Collectives that combine numbers: all_reduce, reduce, reduce_scatter and their other forms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import BadArgument
from shoal.wire.shm.flat import flatten, restore, same, writable
from shoal.wire.shm.reduction import Reduction, reduction
from shoal.wire.shm.surface import Base, Options, title
from shoal.wire.shm.work import Task, Work

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
