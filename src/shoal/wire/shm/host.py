"""The collectives among ranks that share memory.

Each is a loop of rounds (``rounds``): numbers are combined (``combining``, ``prepared``), memory of
one or each is copied (``copying``), or each sends every other its part (``parting``).

Memory is given by address, numbers as flat contiguous tensors, detached.
"""

from __future__ import annotations

from shoal.wire.shm.combining import Combining
from shoal.wire.shm.copying import Copying
from shoal.wire.shm.parting import Parting


class Host(Combining, Copying, Parting):
    """The ranks of one group that share memory, as one of them sees them, and all they can do."""
