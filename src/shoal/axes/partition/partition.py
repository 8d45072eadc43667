"""The class of all partition techniques: four degrees, whose product is the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import BadArgument, UsageError
from shoal.notation import is_whole


@dataclass(frozen=True)
class Partition:
    """How a model is divided among ranks. Partitions are combined by ``shard(2) * tensor(2)``.

    A worker is one replica of the model, which has shard * tensor * pipe ranks.

    Args:
        data: number of replicas. None means the number of ranks / ranks per replica.
        shard: number of ranks that share a replica's parameters, gradients and optimizer state.
        tensor: number of ranks that share the matrices of each layer.
        pipe: number of pipeline stages.
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
        """Return whether a replica has more than one rank."""
        return self.ranks > 1

    def replicas(self, ranks: int) -> int:
        """Return the number of replicas for a number of ranks; raise if the degrees do not fit."""
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
            both = f"data({self.data}) and data({other.data})"
            raise UsageError(f"data appears twice, as {both}; keep one of them")
        return Partition(
            data, self.shard * other.shard, self.tensor * other.tensor, self.pipe * other.pipe
        )

    def __repr__(self) -> str:
        degrees = {"shard": self.shard, "tensor": self.tensor, "pipe": self.pipe}
        cuts = [f"{name}({degree})" for name, degree in degrees.items() if degree > 1]
        data = [f"data({self.data})"] if self.data is not None else []
        return " * ".join(data + cuts) or "data"


def degree(call: str, value: object) -> int:
    """Return ``value`` if it is a valid degree; otherwise raise BadArgument."""
    if not is_whole(value, 1, 65536):
        raise BadArgument(f"{call}({value})", "a degree must be a whole number from 1 to 65536")
    return value
