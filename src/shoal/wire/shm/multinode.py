"""The collectives of a group on several hosts: shared memory inside a host, gloo between hosts.

all_reduce goes in three steps: combine inside each host; combine between hosts; hand the result on
inside each host. The middle one may be shared: where all hosts have as many ranks, rank ``i`` of
each host can combine slice ``i`` with its namesakes, over a connection of its own, or one rank does
it all, whichever is faster (see ``speakers``). Between hosts gloo only moves bytes, so every type
travels, and numbers are combined here in the order of hosts: the result is the same on every rank
and in every run.

broadcast passes once over the network for each host. What sends something else to each rank
(all_gather, scatter, reduce_scatter, all_to_all) goes over gloo between all ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
)

from shoal.errors import LayoutMismatch
from shoal.wire.shm.board import entitled
from shoal.wire.shm.connect import Meeting
from shoal.wire.shm.far import named
from shoal.wire.shm.host import Host
from shoal.wire.shm.lines import TITLE_NBYTES
from shoal.wire.shm.reduction import Reduction
from shoal.wire.shm.rounds import Extent
from shoal.wire.shm.speakers import Speakers

_AGREE = entitled("agreeing with other hosts")


def memory(address: int, nbytes: int) -> Tensor:
    """Memory of this process as a tensor of bytes."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    return torch.frombuffer(block, dtype=torch.uint8)


class Hosts:
    """The ranks of a group on several hosts, as one of them sees them.

    Args:
        local: the ranks of this host.
        nodes: the group's ranks by host.
        meeting: how the group met.
    """

    def __init__(self, local: Host, nodes: Sequence[Sequence[int]], *, meeting: Meeting) -> None:
        self.local, self.board, self.buckets = local, local.board, local.buckets
        self.rank, self.size, self._names = meeting.rank, len(meeting.names), meeting.names
        self._nodes = nodes
        self._home = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
        self._node = self._home[self.rank]
        far = [rank for ranks in nodes for rank in ranks if self._home[rank] != self._node]
        self._far_names = ", ".join(str(self._names[rank]) for rank in far)
        limit = timedelta(seconds=meeting.seconds)

        def gloo(name: str, rank: int, size: int) -> Any:
            return ProcessGroupGloo(PrefixStore(name, meeting.store), rank, size, limit)

        self.everyone = gloo("everyone", self.rank, self.size)
        even = len({len(ranks) for ranks in nodes}) == 1
        lanes = local.size if even else 1
        self.speakers = Speakers((1, lanes), self._slowest)
        mine = local.rank < lanes
        self._lane: Any = gloo(f"lane {local.rank}", self._node, len(nodes)) if mine else None

    def _far(self, title: bytes) -> AbstractContextManager[None]:
        """Inside, gloo speaks with other hosts; if it gives up, that is said, and with whom."""
        return named(title.decode().strip(), f"one of the ranks {self._far_names}")

    def _slowest(self, seconds: Tensor) -> None:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX)
        with self._far(_AGREE):
            self.everyone.allreduce([seconds], options).wait()

    def _agree(self, title: bytes) -> None:
        """Make sure that all hosts have come to the same collective."""
        self.local.barrier(title)
        told = torch.zeros(len(self._nodes) * TITLE_NBYTES, dtype=torch.uint8)
        if self.local.rank == 0:
            mine = torch.frombuffer(bytearray(title), dtype=torch.uint8)
            with self._far(title):
                self._lane._allgather_base(told, mine).wait()
        self.local.broadcast(_AGREE, told.data_ptr(), told.nbytes, root=0)
        rows = told.view(-1, TITLE_NBYTES)
        if not rows.eq(rows[0]).all():
            sides = "; ".join(
                f"{bytes(row.tolist()).decode().strip()} on rank "
                f"{', '.join(str(self._names[r]) for r in ranks)}"
                for row, ranks in zip(rows, self._nodes, strict=True)
            )
            raise LayoutMismatch(f"ranks came to different collectives: {sides}")

    def barrier(self, title: bytes) -> None:
        """Wait for everyone."""
        self._agree(title)

    def all_reduce(self, title: bytes, flat: Tensor, how: Reduction) -> None:
        """Leave everyone's numbers, combined, in ``flat`` of everyone."""
        self._agree(title)
        plain = how._replace(divides=False)
        self.local.all_reduce(title, flat, plain)
        with self.speakers.speaking(flat.nbytes) as count:
            each = -(-flat.numel() // count)
            slices = [flat[i * each : (i + 1) * each] for i in range(count)]
            if self.local.rank < count:
                mine = slices[self.local.rank]
                with self._far(title):
                    self._between(mine, plain)
                if how.divides:
                    mine.div_(self.size)
            for root, part in enumerate(slices):
                self.local.broadcast(title, part.data_ptr(), part.nbytes, root=root)

    def _between(self, flat: Tensor, how: Reduction) -> None:
        """Combine with the namesakes on other hosts: a part each, then everyone's part."""
        count, width = len(self._nodes), flat.element_size()
        each = -(-flat.numel() // count)
        ends = [min(i * each, flat.numel()) for i in range(count + 1)]
        sizes = [(b - a) * width for a, b in pairwise(ends)]
        own = sizes[self._node]
        whole, got = flat.view(torch.uint8), torch.empty(own * count, dtype=torch.uint8)
        self._lane.alltoall_base(got, whole, [own] * count, sizes).wait()
        part = torch.empty(own // width, dtype=flat.dtype)
        if own:
            how(part, [piece.view(flat.dtype) for piece in got.view(count, own)])
        again = part.view(torch.uint8).repeat(count)
        self._lane.alltoall_base(whole, again, sizes, [own] * count).wait()

    def reduce(self, title: bytes, flat: Tensor, how: Reduction, *, root: int) -> None:
        """Leave everyone's numbers, combined, in ``flat`` of one rank."""
        self.all_reduce(title, flat if self.rank == root else flat.clone(), how)

    def broadcast(self, title: bytes, address: int, nbytes: int, *, root: int) -> None:
        """Copy one rank's memory to everyone's: to its leader, to other leaders, to their ranks."""
        self._agree(title)
        source = self._home[root]
        if source == self._node:
            speaker = self._nodes[source].index(root)
            self.local.broadcast(title, address, nbytes, root=speaker)
        if self.local.rank == 0:
            with self._far(title):
                self._lane.broadcast(memory(address, nbytes), source).wait()
        if source != self._node:
            self.local.broadcast(title, address, nbytes, root=0)

    def all_gather(
        self, title: bytes, source: int, *, nbytes: int, targets: Sequence[int] | None
    ) -> None:
        """Copy everyone's ``nbytes`` to ``targets``, one address a rank; None: read nothing."""
        self._agree(title)
        out = torch.empty(nbytes * self.size, dtype=torch.uint8)
        with self._far(title):
            self.everyone._allgather_base(out, memory(source, nbytes)).wait()
        for rank, target in enumerate(targets or ()):
            ctypes.memmove(target, out.data_ptr() + rank * nbytes, nbytes)

    def scatter(
        self, title: bytes, sources: Sequence[int], *, nbytes: int, target: int, root: int
    ) -> None:
        """Copy ``nbytes`` of the root's ``sources``, one address a rank, to each rank."""
        parts = [(source, nbytes) for source in sources] or [(0, 0)] * self.size
        takes = [(target, nbytes if rank == root else 0) for rank in range(self.size)]
        self.all_to_all(title, parts, takes)

    def reduce_scatter(
        self, title: bytes, sources: Sequence[int], *, mine: Tensor, out: Tensor, how: Reduction
    ) -> None:
        """Combine what all ranks have for this rank into ``out``."""
        each = out.nbytes
        got = torch.empty(self.size, out.numel(), dtype=out.dtype)
        starts = [got.data_ptr() + rank * each for rank in range(self.size)]
        self.all_to_all(
            title, [(source, each) for source in sources], [(start, each) for start in starts]
        )
        if out.numel():
            how(out, list(got))

    def all_to_all(
        self, title: bytes, sources: Sequence[Extent], targets: Sequence[Extent]
    ) -> None:
        """Send each rank its own part; all parts are (address, bytes)."""
        self._agree(title)
        sends, takes = [n for _, n in sources], [n for _, n in targets]
        self._agree_parts(sends, takes)
        packed = torch.cat([memory(*source) for source in sources])
        got = torch.empty(sum(takes), dtype=torch.uint8)
        with self._far(title):
            self.everyone.alltoall_base(got, packed, takes, sends).wait()
        for (target, nbytes), part in zip(targets, got.split_with_sizes(takes), strict=True):
            ctypes.memmove(target, part.data_ptr(), nbytes)

    def _agree_parts(self, sends: list[int], takes: list[int]) -> None:
        told, expected = torch.empty(self.size, dtype=torch.int64), torch.tensor(takes)
        ones = [1] * self.size
        self.everyone.alltoall_base(told, torch.tensor(sends), ones, ones).wait()
        wrong = told.ne(expected).to(torch.int64)
        found = wrong.clone()
        self.everyone.allreduce(found).wait()
        if found.any():
            rank = int(found.argmax())
            raise LayoutMismatch(
                f"all_to_all: rank {self._names[rank]} sends other sizes than some rank expects; "
                f"here rank {self._names[self.rank]} expects {takes} bytes and is sent "
                f"{told.tolist()}; the splits must agree"
            )
