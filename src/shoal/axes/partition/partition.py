"""The protocol of the partition axis: degrees, whose product is the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import BadArgument, UsageError
from shoal.notation import is_whole


@dataclass(frozen=True)
class Partition:
    """How a model is cut. Partitions multiply: ``shard(2) * tensor(2)``.

    A worker is one replica: its shard x tensor x pipe ranks together.

    Args:
        data: replicas; None: as many as the ranks allow.
        shard: ranks over which a replica's parameters, gradients and optimizer state are cut.
        tensor: ranks over which single layers are cut.
        pipe: ranks over which the sequence of layers is cut.
    """

    data: int | None = None
    shard: int = 1
    tensor: int = 1
    pipe: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of ranks of one replica."""
        return self.shard * self.tensor * self.pipe

    @property
    def cuts(self) -> bool:
        """Return whether a replica has several ranks."""
        return self.ranks > 1

    def replicas(self, ranks: int) -> int:
        """Return how many replicas this number of ranks makes; raise if the degrees do not fit."""
        each = self.ranks
        if ranks % each or (self.data is not None and self.data * each != ranks):
            data = f"data({self.data}) * " if self.data is not None else ""
            need = each * (self.data or 1)
            raise UsageError(
                f"{ranks} workers cannot be cut as {data}shard({self.shard}) * "
                f"tensor({self.tensor}) * pipe({self.pipe}): the degrees multiply to {need}; "
                f"start {need if self.data else f'a multiple of {need}'} or change a degree"
            )
        return ranks // each

    def __mul__(self, other: object) -> Partition:
        if not isinstance(other, Partition):
            return NotImplemented
        data = other.data if self.data is None else self.data
        if self.data is not None and other.data is not None:
            raise UsageError(f"data appears twice: {self.data} and {other.data}; keep one of them")
        return Partition(
            data, self.shard * other.shard, self.tensor * other.tensor, self.pipe * other.pipe
        )

    def __repr__(self) -> str:
        degrees = {"shard": self.shard, "tensor": self.tensor, "pipe": self.pipe}
        cuts = [f"{name}({degree})" for name, degree in degrees.items() if degree > 1]
        data = [f"data({self.data})"] if self.data is not None else []
        return " * ".join(data + cuts) or "data"


def degree(call: str, value: object) -> int:
    """Return a degree, or raise if it is none."""
    if not is_whole(value, 1, 65536):
        raise BadArgument(f"{call}({value})", "a degree is a whole number from 1 up")
    return value
