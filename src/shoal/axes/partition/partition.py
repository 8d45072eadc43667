"""What a partition is: degrees, whose product is the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import BadArgument, UsageError


@dataclass(frozen=True)
class Partition:
    """What is cut, and into how many. Partitions multiply: ``shard(2) * tensor(2)``.

    A worker is one replica: all its shard x tensor x pipe ranks together.

    Args:
        data: replicas; None takes as many as the ranks allow.
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
        """Ranks that make one replica."""
        return self.shard * self.tensor * self.pipe

    @property
    def cuts(self) -> bool:
        """Whether a replica is spread over several ranks."""
        return self.ranks > 1

    def replicas(self, ranks: int) -> int:
        """How many replicas so many ranks make, or an error that says why they make none."""
        each = self.ranks
        if ranks % each or (self.data is not None and self.data * each != ranks):
            told = f"data({self.data}) * " if self.data is not None else ""
            need = each * (self.data or 1)
            raise UsageError(
                f"{ranks} workers cannot be cut as {told}shard({self.shard}) * "
                f"tensor({self.tensor}) * pipe({self.pipe}): the degrees multiply to {need}; "
                f"start {need if self.data else f'a multiple of {need}'} or change a degree"
            )
        return ranks // each

    def __mul__(self, other: object) -> Partition:
        if not isinstance(other, Partition):
            return NotImplemented
        data = other.data if self.data is None else self.data
        if self.data is not None and other.data is not None:
            raise UsageError(f"data is given twice: {self.data} and {other.data}")
        return Partition(
            data, self.shard * other.shard, self.tensor * other.tensor, self.pipe * other.pipe
        )

    def __repr__(self) -> str:
        degrees = {"shard": self.shard, "tensor": self.tensor, "pipe": self.pipe}
        cuts = [f"{name}({degree})" for name, degree in degrees.items() if degree > 1]
        data = [f"data({self.data})"] if self.data is not None else []
        return " * ".join(data + cuts) or "data"


def degree(call: str, value: object) -> int:
    """Check a degree."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
        raise BadArgument(f"{call}({value})", "a degree is a whole number from 1 up")
    return value
