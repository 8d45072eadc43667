"""Read the options of the backend from environment variables."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import BadArgument

SEGMENT_MB = "SHOAL_SHM_MB"
"""The environment variable for the largest size of a group's segment, in megabytes."""
DIRECT_MB = "SHOAL_SHM_DIRECT_MB"
"""The variable for the least size, in megabytes, of messages read from the sender's memory."""
_SEGMENT_MB_DEFAULT = 256.0
_DIRECT_MB_DEFAULT = 1.0  # from this size on, one copy costs more time than one more barrier
NEVER = sys.maxsize  # a size that no message reaches, so none is read from the sender's memory


def segment_limit_nbytes() -> int:
    """Return the largest size of a segment in bytes, at most 1/4 of the available memory.

    If the system does not report its available memory, the size is that of the option.

    Raises:
        BadArgument: the option is not a positive number.
    """
    why = "must be a positive number of megabytes"
    megabytes = _read(SEGMENT_MB, _SEGMENT_MB_DEFAULT, valid=lambda mb: 0 < mb < math.inf, why=why)
    limit = megabytes * 2**20
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                return int(min(limit, available / 4)) if available else int(limit)
    return int(limit)


def direct_nbytes() -> int:
    """Return the least size in bytes of messages that may be read from the sender's memory.

    Raises:
        BadArgument: the option is not a number, or is negative.
    """
    why = "must be a number of megabytes, 0 or more, or inf"
    megabytes = _read(DIRECT_MB, _DIRECT_MB_DEFAULT, valid=lambda mb: mb >= 0, why=why)
    return int(min(megabytes * 2**20, NEVER))


def _read(variable: str, default: float, *, valid: Callable[[float], bool], why: str) -> float:
    text = os.environ.get(variable, str(default))
    try:
        number = float(text)
    except ValueError:
        number = math.nan  # no option accepts NaN
    if not valid(number):
        raise BadArgument(f"{variable}={text}", why)
    return number
