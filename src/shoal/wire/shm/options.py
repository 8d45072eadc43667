"""Options of the backend, which are environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from shoal.errors import BadArgument


def megabytes(variable: str, usual: float, *, valid: Callable[[float], bool], why: str) -> float:
    """An option in megabytes.

    Args:
        variable: its name.
        usual: what it is where nobody sets it.
        valid: whether a number will do; no NaN does.
        why: what to say of one that does not.

    Raises:
        BadArgument: it is no number, or none that is valid.
    """
    text = os.environ.get(variable, str(usual))
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not valid(number):
        raise BadArgument(f"{variable}={text}", why)
    return number
