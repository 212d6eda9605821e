"""Timeouts in seconds: checks for the argument `timeout`."""

from __future__ import annotations

import math
import numbers
from typing import Final

from weft.base.errors import ConfigurationError

__all__ = ["LONGEST", "seconds"]

#: The longest timeout, about 32 years; a larger finite number stands for this one.
LONGEST: Final = 1e9


def seconds(timeout: float, what: str = "timeout") -> float:
    """A timeout called `what` in errors, in seconds, at most `LONGEST`.

    Raises:
        ConfigurationError: for NaN, infinity and negative numbers; no wait is unbounded.
        TypeError: if it is no real number.
    """
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"{what}: expected a number of seconds, got {type(timeout).__name__}")
    if 0 <= timeout <= LONGEST:
        return timeout
    if LONGEST < timeout < math.inf:
        return LONGEST
    raise ConfigurationError(
        f"{what} {timeout}: a finite number of seconds from 0 on is needed, since no wait is "
        f"unbounded; pass {what}=3600.0 for an hour"
    )
