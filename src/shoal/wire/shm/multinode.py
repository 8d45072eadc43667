"""The collectives of a group on several hosts: shared memory inside a host, gloo between hosts.

all_reduce goes in three steps: combine inside each host; combine between hosts; hand the result on
inside each host. The middle one may be shared: where all hosts have as many ranks, rank ``i`` of
each host can combine slice ``i`` with its namesakes, over a connection of its own, or one rank does
it all, whichever is faster (see ``speakers``). Between hosts gloo only moves bytes, so every type
travels, and numbers are combined here in the order of hosts: the result is the same on every rank
and in every run.

broadcast passes once over the network for each host. What sends something else to each rank
(all_gather, scatter, reduce_scatter, all_to_all) goes over gloo between all ranks.

How many ranks of a host speak with other hosts at once: one for all, or each for a slice.

One message has less overhead; several connections may fill a link, or a core, that one does not.
Which is faster depends on the machines, so it is measured. The first calls of each size (powers of
two) try the ways in turn; then all ranks agree on the one whose slowest rank was done first. Either
way numbers are combined in the order of hosts, so results do not depend on the choice.

Messages between hosts, over gloo; and what it means when gloo gives up.

gloo tells a connection, not a rank, and has one error for all: who has not come in time and who is
gone differ in its words only.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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

from shoal.errors import ExchangeTimeout, LayoutMismatch, PeerLost
from shoal.tuner import Tuner, TunerState
from shoal.wire.shm.backend.work import Work
from shoal.wire.shm.memory.barrier import TITLE_NBYTES, entitled
from shoal.wire.shm.memory.reduce_ops import Reduction
from shoal.wire.shm.node.collectives import Host
from shoal.wire.shm.node.rounds import Extent
from shoal.wire.shm.rendezvous import Meeting

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


log = logging.getLogger(__name__)

TRIES = 4  # of each number and size; the best counts, because the first allocates memory


class Speakers:
    """Chooses how many ranks of a node send to other nodes, for each size of message.

    Args:
        ways: the numbers to choose from.
        slowest: replaces seconds by their maxima over the group; a collective.
        clock: seconds.
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
    def speaking(self, nbytes: int) -> Iterator[int]:
        """Return how many ranks of each node shall send; time the block during a trial."""
        size = nbytes.bit_length()
        if len(self._ways) == 1 or size in self.chosen:
            yield self.chosen.get(size, self._ways[0])
            return
        state, begin = self._states[size], self._clock()
        yield self._ways[state.at]
        state = self._tuner.observe(self._tuner.advance(state), self._clock() - begin)
        self._states[size] = state
        if self._tuner.tried(state):
            self._choose(size)

    def _choose(self, size: int) -> None:
        least = torch.tensor(self._states.pop(size).summary(min))
        self._slowest(least)
        seconds = dict(enumerate(least.tolist()))
        self.chosen[size] = self._ways[self._tuner.best(seconds)]
        times = ", ".join(f"{self._ways[i]}: {s * 1e3:.2f} ms" for i, s in seconds.items())
        log.debug("below %d bytes, leaders of a node: %d (%s)", 1 << size, self.chosen[size], times)


_LATE = "Timed out"


@contextmanager
def named(what: str, whom: str) -> Iterator[None]:
    """Say of gloo's errors what was being done, and with whom.

    Raises:
        ExchangeTimeout: not done in time.
        PeerLost: the connection is broken.
    """
    try:
        yield
    except RuntimeError as error:
        kind = ExchangeTimeout if _LATE in str(error) else PeerLost
        raise kind(f"{what}: {whom}, between hosts: {error}") from error


class Letter(Work):
    """A message that gloo carries.

    Args:
        inner: gloo's own work.
        flat: the message.
        what: is done with it.
        whom: with.
        finally_: what to do when it is there.
    """

    def __init__(
        self,
        inner: Any,
        flat: Tensor,
        *,
        what: str,
        whom: str,
        finally_: Callable[[], None] | None = None,
    ) -> None:
        super().__init__([flat])
        self._inner, self._what, self._whom, self._finally = inner, what, whom, finally_

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent or received, and raise what went wrong."""
        if not self._done:  # gloo would wait for another one
            limit = (timeout,) if timeout else ()
            with named(self._what, self._whom):
                self._inner.wait(*limit)
            if self._finally is not None:
                self._finally()
            self.finish()
        return super().wait()

    def get_future(self) -> Any:
        """A torch future of the tensors, which are there: nobody else waits for them."""
        self.wait()
        return super().get_future()

    def is_completed(self) -> bool:
        """Whether it is known to be done; gloo tells only who waits."""
        return self._done or bool(self._inner.is_completed())

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    def source_rank(self) -> int:
        """Whom the message came from."""
        return self._source_rank()


class GlooPost:
    """Messages of a group on several hosts: all of them over gloo.

    Args:
        gloo: between all ranks.
        names: of the group's ranks.
    """

    def __init__(self, gloo: Any, names: Sequence[int]) -> None:
        self._gloo, self._names = gloo, names

    def send(self, flat: Tensor, peer: int, *, tag: int) -> Letter:
        """Begin to send a message."""
        what, whom = f"send (tag {tag})", f"rank {self._names[peer]}"
        with named(what, whom):
            return Letter(self._gloo.send([flat], peer, tag), flat, what=what, whom=whom)

    def receive(
        self, flat: Tensor, peer: int | None, *, tag: int, finally_: Callable[[], None]
    ) -> Letter:
        """Begin to receive a message into ``flat``."""
        whom = "any rank" if peer is None else f"rank {self._names[peer]}"
        what = f"receive (tag {tag})"
        with named(what, whom):
            if peer is None:
                inner = self._gloo.recv_anysource([flat], tag)
            else:
                inner = self._gloo.recv([flat], peer, tag)
        return Letter(inner, flat, what=what, whom=whom, finally_=finally_)

    def stop(self) -> None:
        """Nothing of its own to end."""
