"""The collectives of a group on several nodes: shared memory inside a node, gloo between nodes.

all_reduce has three phases:

1. Combine inside each node.
2. Combine between nodes. The ranks that do this are called *leaders*. Either rank 0 of each node is
   the only leader. Or, if all nodes have equally many ranks, all ranks are leaders, and rank ``i``
   of each node combines slice ``i`` over a connection of its own.
3. Broadcast the result inside each node.

One leader has less overhead, but several leaders may use the network or the cores better. So for
each size (power of two) the first calls try both numbers in turn. Then all ranks choose the number
that was faster on the slowest rank (``Leaders``). The choice does not change results.

Between nodes gloo only copies bytes, so every dtype can be sent. This module combines the bytes in
the order of nodes, so the result is the same on every rank and in every run.

broadcast sends the data to each other node once. all_gather, scatter, reduce_scatter and all_to_all
use gloo between all ranks.

The errors of gloo name a connection, not a rank, and have one type for all faults. Only the text
distinguishes a timeout from a lost peer.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo, ReduceOp

from shoal.errors import ExchangeTimeout, LayoutMismatch, PeerLost
from shoal.tuner import Tuner, TunerState
from shoal.wire.shm.memory.barrier import SIGNATURE_NBYTES, op_signature
from shoal.wire.shm.memory.buffers import tensor_at
from shoal.wire.shm.memory.peers import NodeRendezvous
from shoal.wire.shm.memory.reduce_ops import Reduction
from shoal.wire.shm.node.collectives import MemoryRange, NodeCollectives
from shoal.wire.shm.work import Work

log = logging.getLogger(__name__)
_AGREE_SIGNATURE = op_signature("agreeing with other nodes")
_TIMEOUT_TEXT = "Timed out"

Callback = Callable[[], None]
ErrorContexts = Callable[[], AbstractContextManager[None]]


@contextmanager
def gloo_errors(operation: str, peer: str) -> Iterator[None]:
    """Replace gloo's errors in the block by errors that name the operation and the peer.

    Raises:
        ExchangeTimeout: gloo reports a timeout.
        PeerLost: gloo reports any other error.
    """
    try:
        yield
    except RuntimeError as error:
        kind = ExchangeTimeout if _TIMEOUT_TEXT in str(error) else PeerLost
        raise kind(f"{operation}: communication with {peer} over gloo failed: {error}") from error


class MultiNodeCollectives:
    """The collectives of a group on several nodes. ``nodes`` has the ranks of each node."""

    def __init__(
        self, local: NodeCollectives, nodes: Sequence[Sequence[int]], rendezvous: NodeRendezvous
    ) -> None:
        self.local, self.buffers = local, local.buffers
        self.rank, self.size = rendezvous.rank, len(rendezvous.names)
        self._names, self._nodes = rendezvous.names, nodes
        self._node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
        self._node = self._node_of[self.rank]
        remote = [r for ranks in nodes for r in ranks if self._node_of[r] != self._node]
        self._remote_names = ", ".join(str(self._names[rank]) for rank in remote)
        limit = timedelta(seconds=rendezvous.seconds)

        def gloo(name: str, rank: int, size: int) -> Any:
            return ProcessGroupGloo(PrefixStore(name, rendezvous.store), rank, size, limit)

        self.all_ranks = gloo("everyone", self.rank, self.size)
        most = local.size if len({len(ranks) for ranks in nodes}) == 1 else 1
        self.leaders = Leaders((1, most), self._slowest)
        # the leaders of one slice, one on each node, have their own gloo group
        leads = local.rank < most
        self._peers: Any = gloo(f"lane {local.rank}", self._node, len(nodes)) if leads else None

    def _gloo_errors(self, signature: bytes) -> AbstractContextManager[None]:
        return gloo_errors(signature.decode().strip(), f"one of the ranks {self._remote_names}")

    def _slowest(self, seconds: Tensor) -> None:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX)
        with self._gloo_errors(_AGREE_SIGNATURE):
            self.all_ranks.allreduce([seconds], options).wait()

    def barrier(self, signature: bytes) -> None:
        """Wait for all ranks, and check that all nodes call the same collective.

        Raises:
            LayoutMismatch: nodes call different collectives, which the message shows.
        """
        self.local.barrier(signature)
        signatures = torch.zeros(len(self._nodes) * SIGNATURE_NBYTES, dtype=torch.uint8)
        if self.local.rank == 0:
            own = torch.frombuffer(bytearray(signature), dtype=torch.uint8)
            with self._gloo_errors(signature):
                self._peers._allgather_base(signatures, own).wait()
        self.local.broadcast(_AGREE_SIGNATURE, signatures.data_ptr(), signatures.nbytes, root=0)
        rows = signatures.view(-1, SIGNATURE_NBYTES)
        if not rows.eq(rows[0]).all():
            sides = "; ".join(
                f"{bytes(row.tolist()).decode().strip()} on rank "
                f"{', '.join(str(self._names[r]) for r in ranks)}"
                for row, ranks in zip(rows, self._nodes, strict=True)
            )
            text = f"ranks called different collectives: {sides}; all ranks must call the same one"
            raise LayoutMismatch(text)

    def all_reduce(self, signature: bytes, flat: Tensor, op: Reduction) -> None:
        """Combine ``flat`` of all ranks, in place on all ranks."""
        self.barrier(signature)
        undivided = op._replace(divides=False)
        self.local.all_reduce(signature, flat, undivided)
        with self.leaders.leading(flat.nbytes) as count:
            each = -(-flat.numel() // count)
            slices = [flat[i * each : (i + 1) * each] for i in range(count)]
            if self.local.rank < count:
                own = slices[self.local.rank]
                with self._gloo_errors(signature):
                    self._all_reduce_between(own, undivided)
                if op.divides:
                    own.div_(self.size)
            for root, part in enumerate(slices):
                self.local.broadcast(signature, part.data_ptr(), part.nbytes, root=root)

    def _all_reduce_between(self, flat: Tensor, op: Reduction) -> None:
        """Combine ``flat`` of this slice's leaders in place by reduce_scatter and all_gather."""
        count, width = len(self._nodes), flat.element_size()
        each = -(-flat.numel() // count)
        ends = [min(i * each, flat.numel()) for i in range(count + 1)]
        sizes = [(b - a) * width for a, b in pairwise(ends)]
        own = sizes[self._node]
        whole, parts = flat.view(torch.uint8), torch.empty(own * count, dtype=torch.uint8)
        self._peers.alltoall_base(parts, whole, [own] * count, sizes).wait()
        result = torch.empty(own // width, dtype=flat.dtype)
        if own:
            op(result, [part.view(flat.dtype) for part in parts.view(count, own)])
        results = result.view(torch.uint8).repeat(count)
        self._peers.alltoall_base(whole, results, sizes, [own] * count).wait()

    def reduce(self, signature: bytes, flat: Tensor, op: Reduction, *, root: int) -> None:
        """Combine ``flat`` of all ranks into that of the root. Other ranks keep their own."""
        self.all_reduce(signature, flat if self.rank == root else flat.clone(), op)

    def broadcast(self, signature: bytes, address: int, nbytes: int, *, root: int) -> None:
        """Copy the root's memory inside its node, to rank 0 of other nodes, then inside these."""
        self.barrier(signature)
        source = self._node_of[root]
        if source == self._node:
            index = self._nodes[source].index(root)
            self.local.broadcast(signature, address, nbytes, root=index)
        if self.local.rank == 0:
            with self._gloo_errors(signature):
                self._peers.broadcast(tensor_at(address, nbytes), source).wait()
        if source != self._node:
            self.local.broadcast(signature, address, nbytes, root=0)

    def all_gather(
        self, signature: bytes, source: int, *, nbytes: int, targets: Sequence[int] | None
    ) -> None:
        """Copy ``nbytes`` at ``source`` of rank r to ``targets[r]``. Without targets, only send."""
        self.barrier(signature)
        out = torch.empty(nbytes * self.size, dtype=torch.uint8)
        with self._gloo_errors(signature):
            self.all_ranks._allgather_base(out, tensor_at(source, nbytes)).wait()
        for rank, target in enumerate(targets or ()):
            ctypes.memmove(target, out.data_ptr() + rank * nbytes, nbytes)

    def scatter(
        self, signature: bytes, sources: Sequence[int], *, nbytes: int, target: int, root: int
    ) -> None:
        """Copy ``nbytes`` at the root's ``sources[r]`` to ``target`` of rank r, for all r."""
        parts = [(source, nbytes) for source in sources] or [(0, 0)] * self.size
        targets = [(target, nbytes if rank == root else 0) for rank in range(self.size)]
        self.all_to_all(signature, parts, targets)

    def reduce_scatter(
        self, signature: bytes, sources: Sequence[int], *, own: Tensor, out: Tensor, op: Reduction
    ) -> None:
        """Combine what is at ``sources[r]`` of all ranks into ``out`` of rank r, for all r."""
        each = out.nbytes
        parts = torch.empty(self.size, out.numel(), dtype=out.dtype)
        targets = [(parts.data_ptr() + rank * each, each) for rank in range(self.size)]
        self.all_to_all(signature, [(source, each) for source in sources], targets)
        if out.numel():
            op(out, list(parts))

    def all_to_all(
        self, signature: bytes, sources: Sequence[MemoryRange], targets: Sequence[MemoryRange]
    ) -> None:
        """Send ``sources[r]`` to rank r, and receive ``targets[r]`` from it, for all r."""
        self.barrier(signature)
        sent, expected = [n for _, n in sources], [n for _, n in targets]
        self._check_sizes(sent, expected)
        packed = torch.cat([tensor_at(*source) for source in sources])
        received = torch.empty(sum(expected), dtype=torch.uint8)
        with self._gloo_errors(signature):
            self.all_ranks.alltoall_base(received, packed, expected, sent).wait()
        parts = received.split_with_sizes(expected)
        for (target, nbytes), part in zip(targets, parts, strict=True):
            ctypes.memmove(target, part.data_ptr(), nbytes)

    def _check_sizes(self, sent: list[int], expected: list[int]) -> None:
        """Raise LayoutMismatch, on all ranks, if a rank expects another size than is sent."""
        incoming, ones = torch.empty(self.size, dtype=torch.int64), [1] * self.size
        self.all_ranks.alltoall_base(incoming, torch.tensor(sent), ones, ones).wait()
        mismatches = incoming.ne(torch.tensor(expected)).to(torch.int64)
        self.all_ranks.allreduce(mismatches).wait()
        if mismatches.any():
            rank = int(mismatches.argmax())
            raise LayoutMismatch(
                f"all_to_all: rank {self._names[rank]} sends other sizes than a receiver expects; "
                f"here rank {self._names[self.rank]} expects {expected} bytes and is sent "
                f"{incoming.tolist()}; the splits must agree"
            )


TRIES = 4  # calls for each size and number of leaders; the fastest counts, as the first is slow


class Leaders:
    """Chooses the number of leaders of a node, for each size of message, by timing.

    ``ways`` are the numbers of leaders to choose from. ``slowest`` is a collective that replaces
    the elements of a tensor by their maxima over the group.
    """

    def __init__(
        self,
        ways: Sequence[int],
        slowest: Callable[[Tensor], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ways, self._slowest, self._clock = tuple(dict.fromkeys(ways)), slowest, clock
        self._tuner = Tuner(len(self._ways), TRIES, takes_turns=True)
        self._states: dict[int, TunerState] = defaultdict(self._tuner.start)
        self.chosen: dict[int, int] = {}  # by the number of bits of the size in bytes

    @contextmanager
    def leading(self, nbytes: int) -> Iterator[int]:
        """Yield the number of leaders to use in the block. Time the block until one is chosen."""
        size = nbytes.bit_length()
        if len(self._ways) == 1 or size in self.chosen:
            yield self.chosen.get(size, self._ways[0])
            return
        state, begin = self._states[size], self._clock()
        yield self._ways[state.at]
        seconds = self._clock() - begin
        self._states[size] = state = self._tuner.observe(self._tuner.advance(state), seconds)
        if self._tuner.tried(state):
            self._choose(size)

    def _choose(self, size: int) -> None:
        least = torch.tensor(self._states.pop(size).summary(min))
        self._slowest(least)
        seconds = dict(enumerate(least.tolist()))
        self.chosen[size] = self._ways[self._tuner.best(seconds)]
        times = ", ".join(f"{self._ways[i]}: {s * 1e3:.2f} ms" for i, s in seconds.items())
        log.debug("%d leaders below %d bytes (%s)", self.chosen[size], 1 << size, times)


class GlooWork(Work):
    """A message over gloo. ``wait`` calls ``on_success`` when the message is complete."""

    def __init__(
        self, inner: Any, flat: Tensor, errors: ErrorContexts, on_success: Callback | None = None
    ) -> None:
        super().__init__([flat])
        self._inner, self._errors, self._on_success = inner, errors, on_success

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent or received, and return True. Raise its error if any."""
        if not self._done:  # a second wait of gloo would wait for another message
            with self._errors():
                self._inner.wait(*([timeout] if timeout else []))
            if self._on_success is not None:
                self._on_success()
            self.finish()
        return super().wait()

    def get_future(self) -> Any:
        """Wait, then return a completed future, because no thread would complete it later."""
        self.wait()
        return super().get_future()

    def is_completed(self) -> bool:
        """Return whether the message is known to be done. It may be known only after ``wait``."""
        return self._done or bool(self._inner.is_completed())

    def source_rank(self) -> int:
        """Return the rank that sent the received message."""
        return int(self._inner._source_rank())

    _source_rank = source_rank


class GlooP2P:
    """The point-to-point messages of a group on several nodes, all over gloo."""

    def __init__(self, gloo: Any, names: Sequence[int]) -> None:
        self._gloo, self._names = gloo, names

    def send(self, flat: Tensor, peer: int, *, tag: int) -> GlooWork:
        """Begin to send a message."""
        errors = partial(gloo_errors, f"send (tag {tag})", f"rank {self._names[peer]}")
        with errors():
            return GlooWork(self._gloo.send([flat], peer, tag), flat, errors)

    def receive(
        self, flat: Tensor, peer: int | None, *, tag: int, on_success: Callback
    ) -> GlooWork:
        """Begin to receive a message into ``flat``."""
        name = "any rank" if peer is None else f"rank {self._names[peer]}"
        errors = partial(gloo_errors, f"receive (tag {tag})", name)
        with errors():
            if peer is None:
                inner = self._gloo.recv_anysource([flat], tag)
            else:
                inner = self._gloo.recv([flat], peer, tag)
        return GlooWork(inner, flat, errors, on_success)

    def stop(self) -> None:
        """Do nothing, because there is no thread to end."""
