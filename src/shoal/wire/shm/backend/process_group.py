"""The ``shoal`` process group, which has every collective and message of torch.distributed.

Each method checks its arguments, flattens the tensors (``tensors``), and runs or queues a call of
the transports (``rendezvous``). torch defines the names and arguments of the methods. The methods
for names and devices replace torch's methods, which work only for backends written in C++.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.errors import BadArgument, UsageError
from shoal.wire.shm.backend.tensors import flatten, flatten_output, require_size, restore, signature
from shoal.wire.shm.memory.barrier import FAILED, LEFT, Barrier, op_signature
from shoal.wire.shm.memory.buffers import share_buffer
from shoal.wire.shm.memory.peers import NodeRendezvous
from shoal.wire.shm.memory.reduce_ops import Reduction, reduction
from shoal.wire.shm.multinode import GlooP2P
from shoal.wire.shm.node.collectives import MemoryRange
from shoal.wire.shm.node.p2p import P2P
from shoal.wire.shm.rendezvous import Transports, connect
from shoal.wire.shm.work import CollectiveCall, Work, WorkQueue

# typed as Any, because torch declares overloads of each method that are not implemented here
_TorchGroup: Any = dist.ProcessGroup
Tensors = Sequence[Tensor]
CallOptions = Any  # each collective has its own class of options in torch, all with asyncOp
_SUM = hash(dist.ReduceOp.SUM)


class ShoalGroup(_TorchGroup):  # type: ignore[misc]
    """The process group that ``init_process_group("shoal")`` creates."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, store: Store, rank: int, size: int, *, transports: Transports) -> None:
        super().__init__(rank, size)  # torch's constructor with a store fails in a subclass
        self._rank_and_size, self._names = (rank, size), ("", "undefined")
        self._store, self._pid = store, os.getpid()
        self._collectives, self._p2p, self._barrier = transports
        self._sequence_number = 0
        self._queue = WorkQueue(self._barrier)
        parts = self._queue, self._p2p, self._barrier
        self._close = weakref.finalize(self, _close, self._pid, *parts)
        self._close.atexit = False

    # Names, devices and settings

    def rank(self) -> int:
        """Return the rank of this process, faster than torch's own method."""
        return self._rank_and_size[0]

    def size(self) -> int:
        """Return the number of ranks."""
        return self._rank_and_size[1]

    def name(self) -> str:
        """Return the name of the backend."""
        return "shoal"

    getBackendName = name  # for torch's C++ side

    @property
    def group_name(self) -> Any:
        """The name under which torch registers the group."""
        return self._names[0]

    def _set_group_name(self, name: str) -> None:
        self._names = (name, self._names[1])

    @property
    def group_desc(self) -> str:
        """The description of the group."""
        return self._names[1]

    def _set_group_desc(self, desc: str) -> None:
        self._names = (self._names[0], desc)

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False, so that torch does not ask for memory; see :meth:`allocate`."""
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence_number

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing, because every group counts from zero."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout inside a node. The timeout of gloo between nodes does not change."""
        self._barrier.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # Running and closing

    def _run(
        self,
        call: CollectiveCall,
        outputs: Tensors,
        opts: CallOptions = None,
        *,
        flats: Tensors = (),
        inputs: Tensors = (),
    ) -> Work:
        """Run a collective after all earlier ones. An asynchronous call runs in the background.

        When ``call`` is done, those of ``flats`` that are copies are copied into ``outputs``.
        ``inputs`` are kept alive until then, because ``call`` reads them by address.
        """
        self._require_open()
        self._sequence_number += 1
        if flats or inputs:
            call = partial(_call_and_restore, call, outputs, flats, inputs)
        return self._queue.run(call, outputs, background=getattr(opts, "asyncOp", True))

    def _require_open(self) -> None:
        """Raise UsageError if the group belongs to another process, or has been destroyed."""
        if self._pid != os.getpid():
            raise UsageError(
                f"this group belongs to process {self._pid}, and its fork, process {os.getpid()}, "
                "cannot use it; create a new group in the fork"
            )
        if self._queue.stopped:
            raise UsageError(f"group {self.group_name!r} has been destroyed; create a new one")

    def shutdown(self) -> None:
        """Leave the group, end its threads and tell the other ranks."""
        self._close()

    def abort(self) -> None:
        """Leave the group as failed. Other ranks of this node that wait in it get an error."""
        if self._pid == os.getpid():
            self._barrier.headers.set_status(FAILED, "the group was aborted")
        self._close()

    # Collectives that combine elements

    def allreduce(
        self, tensors: Tensors | Tensor, opts: CallOptions = None, timeout: object = None
    ) -> Work:
        """Combine the tensors of all ranks, in place on all ranks."""
        outputs = [tensors] if isinstance(tensors, Tensor) else tensors
        if len(outputs) == 1:
            return self._run(self._allreduce(outputs[0], opts), outputs, opts)
        calls = [self._allreduce(tensor, opts) for tensor in outputs]
        return self._run(partial(_call_each, calls), outputs, opts)

    allreduce_coalesced = allreduce

    def _allreduce(self, tensor: Tensor, opts: CallOptions) -> CollectiveCall:
        flat = flatten_output(tensor, "all_reduce")
        name, op = _allreduce_signature(_op_hash(opts), flat.dtype, flat.numel())
        call = partial(self._collectives.all_reduce, name, flat, op)
        return call if flat is tensor else partial(_call_and_restore, call, [tensor], [flat])

    def reduce(self, tensors: Tensors, opts: CallOptions) -> Work:
        """Combine the tensors of all ranks, in place on the root."""
        (tensor,) = tensors
        op, root = reduction(_op_hash(opts), tensor.dtype), opts.rootRank
        flat = flatten_output(tensor, "reduce")
        name = signature(f"reduce ({op.name}) to {root}", flat.dtype, flat.numel())
        call = partial(self._collectives.reduce, name, flat, op, root=root)
        return self._run(call, tensors, opts, flats=[flat] if self.rank() == root else ())

    def reduce_scatter(
        self, outputs: Tensors | Tensor, inputs: Sequence[Any], opts: CallOptions = None
    ) -> Work:
        """Combine item ``r`` of the lists of all ranks into the output of rank ``r``, for all r."""
        output = outputs if isinstance(outputs, Tensor) else outputs[0]
        pieces = [inputs[0]] if isinstance(inputs[0], Tensor) else list(inputs[0])
        self._require_one_a_rank(f"reduce_scatter of {len(pieces)} tensors", pieces)
        require_size(pieces, output, numel=output.numel(), call="reduce_scatter")
        flats = [flatten(piece, "reduce_scatter") for piece in pieces]
        sources = [flat.data_ptr() for flat in flats]
        return self._reduce_scatter(output, sources, flats[self.rank()], opts, inputs=flats)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: CallOptions = None) -> Work:
        """Combine part ``r`` of all inputs into the output of rank ``r``, for all r."""
        numel, nbytes = output.numel(), output.nbytes
        require_size([input], output, numel=numel * self.size(), call="reduce_scatter_tensor")
        whole = flatten(input, "reduce_scatter_tensor")
        sources = [whole.data_ptr() + rank * nbytes for rank in range(self.size())]
        own = whole[self.rank() * numel : (self.rank() + 1) * numel]
        return self._reduce_scatter(output, sources, own, opts, inputs=[whole])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: CallOptions = None
    ) -> Work:
        """Run a reduce_scatter_tensor for each pair, and return the work of the last pair."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self._reduce_scatter_base(output, input, opts) for output, input in pairs]
        return works[-1] if works else Work([], done=True)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(
        self, output: Tensor, sources: list[int], own: Tensor, opts: CallOptions, *, inputs: Any
    ) -> Work:
        op = reduction(_op_hash(opts), output.dtype)
        out = flatten_output(output, "reduce_scatter")
        name = signature(f"reduce_scatter ({op.name})", out.dtype, out.numel())
        reduce_scatter = self._collectives.reduce_scatter
        call = partial(reduce_scatter, name, sources, own=own, out=out, op=op)
        return self._run(call, [output], opts, flats=[out], inputs=inputs)

    # Collectives that copy one tensor of each rank

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather the tensors of all ranks into a list, on every rank."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self._gather(targets, source, opts, root=None) for targets, source in pairs]
        return works[-1] if works else Work([], done=True)

    allgather_coalesced = allgather

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: CallOptions) -> Work:
        """Gather the tensors of all ranks into a list, on the root."""
        targets = outputs[0] if outputs else []
        return self._gather(targets, inputs[0], opts, root=opts.rootRank)

    def _gather(
        self, outputs: Tensors, source: Tensor, opts: CallOptions, *, root: int | None
    ) -> Work:
        what = "all_gather" if root is None else f"gather to {root}"
        reads = root is None or root == self.rank()
        if reads:
            self._require_one_a_rank(f"{what} into {len(outputs)} tensors", outputs)
        require_size(outputs, source, numel=source.numel(), call=what)
        flat, outs = flatten(source, what), [flatten_output(output, what) for output in outputs]
        name, nbytes = signature(what, flat.dtype, flat.numel()), flat.nbytes
        targets = [out.data_ptr() for out in outs] if reads else None
        gather = self._collectives.all_gather
        call = partial(gather, name, flat.data_ptr(), nbytes=nbytes, targets=targets)
        return self._run(call, outputs, opts, flats=outs, inputs=[flat])

    def _allgather_base(self, output: Tensor, input: Tensor, opts: CallOptions = None) -> Work:
        """Gather the tensors of all ranks into one tensor, on every rank."""
        numel = input.numel() * self.size()
        require_size([output], input, numel=numel, call="all_gather_into_tensor")
        flat, out = flatten(input, "all_gather"), flatten_output(output, "all_gather")
        name = signature("all_gather", flat.dtype, flat.numel())
        targets = [out.data_ptr() + rank * flat.nbytes for rank in range(self.size())]
        gather, source, nbytes = self._collectives.all_gather, flat.data_ptr(), flat.nbytes
        call = partial(gather, name, source, nbytes=nbytes, targets=targets)
        return self._run(call, [output], opts, flats=[out], inputs=[flat])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: CallOptions = None
    ) -> Work:
        """Run an all_gather_into_tensor for each pair, and return the work of the last pair."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self._allgather_base(output, input, opts) for output, input in pairs]
        return works[-1] if works else Work([], done=True)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    # Other collectives that copy: broadcast, scatter and all_to_all

    def broadcast(self, tensors: Tensors | Tensor, opts: Any, *rest: Any) -> Work:
        """Copy the root's tensors to all ranks."""
        outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        is_root = self.rank() == root
        flats = [(flatten if is_root else flatten_output)(x, "broadcast") for x in outputs]
        broadcast, calls = self._collectives.broadcast, []
        for flat in flats:
            name = signature(f"broadcast from {root}", flat.dtype, flat.numel())
            calls.append(partial(broadcast, name, flat.data_ptr(), flat.nbytes, root=root))
        results, opts = () if is_root else flats, None if isinstance(opts, int) else opts
        return self._run(partial(_call_each, calls), outputs, opts, flats=results, inputs=flats)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: CallOptions) -> Work:
        """Copy to each rank its item of the root's list."""
        root, output = opts.rootRank, outputs[0]
        pieces = list(inputs[0]) if inputs and self.rank() == root else []
        if self.rank() == root:
            self._require_one_a_rank(f"scatter of {len(pieces)} tensors", pieces)
        require_size(pieces, output, numel=output.numel(), call="scatter")
        flats = [flatten(piece, "scatter") for piece in pieces]
        out = flatten_output(output, "scatter")
        name = signature(f"scatter from {root}", out.dtype, out.numel())
        sources, target = [flat.data_ptr() for flat in flats], out.data_ptr()
        scatter, nbytes = self._collectives.scatter, out.nbytes
        call = partial(scatter, name, sources, nbytes=nbytes, target=target, root=root)
        return self._run(call, outputs[:1], opts, flats=[out], inputs=flats)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: CallOptions = None) -> Work:
        """Send ``inputs[r]`` to rank ``r`` and receive ``outputs[r]`` from it, for all r."""
        for tensors in (inputs, outputs):
            what = f"all_to_all of {len(inputs)} into {len(outputs)} tensors"
            self._require_one_a_rank(what, tensors)
        sources = [flatten(tensor, "all_to_all") for tensor in inputs]
        targets = [flatten_output(tensor, "all_to_all") for tensor in outputs]
        name = op_signature(f"all_to_all of {sources[0].dtype}")
        call = partial(self._collectives.all_to_all, name, _ranges(sources), _ranges(targets))
        return self._run(call, outputs, opts, flats=targets, inputs=sources)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: CallOptions = None,
    ) -> Work:
        """Send rows of ``input`` to each rank, and receive rows of ``output`` from each rank."""
        source, target = flatten(input, "all_to_all"), flatten_output(output, "all_to_all")
        sources = self._split_rows(source, input, input_split_sizes)
        targets = self._split_rows(target, output, output_split_sizes)
        name = op_signature(f"all_to_all of {source.dtype}")
        call = partial(self._collectives.all_to_all, name, sources, targets)
        return self._run(call, [output], opts, flats=[target], inputs=[source])

    all_to_all_single = alltoall_base

    def _split_rows(self, flat: Tensor, tensor: Tensor, splits: Sequence[int]) -> list[MemoryRange]:
        """Return (address, bytes) of each rank's rows. Without ``splits`` the parts are equal."""
        rows, size = tensor.shape[0] if tensor.dim() else 1, self.size()
        counts = list(splits) or [rows // size] * size
        if sum(counts) != rows or len(counts) != size:
            raise BadArgument(
                f"all_to_all_single of {rows} rows in parts {counts}",
                f"there must be one part for each of {size} ranks, and together all rows",
            )
        width, address, parts = flat.nbytes // rows if rows else 0, flat.data_ptr(), []
        for count in counts:
            parts.append((address, count * width))
            address += count * width
        return parts

    def _require_one_a_rank(self, call: str, tensors: Tensors) -> None:
        if len(tensors) != self.size():
            raise BadArgument(call, f"it needs one tensor for each of the {self.size()} ranks")

    # Barriers

    def barrier(self, opts: CallOptions = None, timeout: timedelta | None = None) -> Work:
        """Wait for all ranks."""
        return self._run(partial(self._collectives.barrier, op_signature("barrier")), [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks. After ``timeout`` the error names all missing ranks of this node."""
        name, barrier = op_signature("monitored_barrier"), self._barrier
        default = barrier.seconds

        def call() -> None:
            try:
                barrier.seconds = timeout.total_seconds() if timeout else default
                self._collectives.barrier(name)
            finally:
                barrier.seconds = default

        self._run(call, []).wait()

    # Point-to-point messages

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        """Begin to send a tensor to a rank."""
        self._require_other(dstRank, "send to")
        return self._p2p.send(flatten(tensors[0], "send"), dstRank, tag=tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        """Begin to receive a tensor from a rank."""
        return self._receive(tensors[0], srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Begin to receive a tensor from any rank."""
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: Tensor, peer: int | None, tag: int) -> Work:
        self._require_other(peer, "receive from")
        flat = flatten_output(tensor, "recv")
        return self._p2p.receive(flat, peer, tag=tag, on_success=lambda: restore(tensor, flat))

    def _require_other(self, peer: int | None, what: str) -> None:
        self._require_open()
        if peer == self.rank():
            raise BadArgument(f"{what} rank {peer}", "that is this rank itself; use copy_ instead")

    # Shared buffers

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of zeros in shared memory. All ranks must call this method."""
        headers, buffers = self._barrier.headers, self._collectives.buffers
        key, nbytes = f"bucket/{headers.names[0]}/{len(buffers)}", numel * dtype.itemsize
        buffer = share_buffer(self._store, key, nbytes, rank=headers.rank, size=headers.size)
        buffers.append(buffer)
        return buffer.tensor(numel, dtype)


def _close(pid: int, queue: WorkQueue, p2p: P2P | GlooP2P, barrier: Barrier) -> None:
    if pid != os.getpid():  # a forked process has no threads of the group and is not a rank
        return
    queue.stop()
    p2p.stop()
    barrier.headers.set_status(LEFT)


def _call_each(calls: Sequence[CollectiveCall]) -> None:
    for call in calls:
        call()


def _call_and_restore(
    call: CollectiveCall, outputs: Tensors, flats: Tensors, inputs: Tensors = ()
) -> None:
    """Run ``call``, then copy each flat result into its output. ``inputs`` are only kept alive."""
    call()
    for output, flat in zip(outputs, flats, strict=False):
        restore(output, flat)


def _ranges(flats: Tensors) -> list[MemoryRange]:
    return [(flat.data_ptr(), flat.nbytes) for flat in flats]


def _op_hash(opts: CallOptions) -> int:
    """Return the hash of the reduce operation, which is in ``opts`` or is ``opts`` itself."""
    return _SUM if opts is None else hash(getattr(opts, "reduceOp", opts))


@lru_cache(maxsize=1024)
def _allreduce_signature(kind: int, dtype: torch.dtype, numel: int) -> tuple[bytes, Reduction]:
    op = reduction(kind, dtype)
    return signature(f"all_reduce ({op.name})", dtype, numel), op


def allocate(numel: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return a flat tensor of zeros, which is in shared memory if the group is a ``shoal`` group.

    Every rank of a ``shoal`` group must call this, in the same order and with the same arguments.
    all_reduce of the tensor, or of a contiguous part of it, then reduces in place without a copy
    inside a node. The memory is freed when group and tensor are both deleted. For any other group
    the tensor is an ordinary tensor. If ``group`` is None, it is the default group.
    """
    group = group if group is not None else dist.group.WORLD
    if isinstance(group, ShoalGroup):
        return group.allocate(numel, dtype)
    return torch.zeros(numel, dtype=dtype)


def create(options: Any, _: Any = None) -> ShoalGroup:
    """Create a group. torch calls this function with the options of the group."""
    rank, size = options.group_rank, options.group_size
    names = tuple(options.global_ranks_in_group or range(size))
    rendezvous = NodeRendezvous(options.store, rank, names, options.timeout.total_seconds())
    return ShoalGroup(options.store, rank, size, transports=connect(rendezvous))
