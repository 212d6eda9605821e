"""Route to a peer, and statistics of its traffic."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Route", "Statistics"]


class Route(NamedTuple):
    """Route to a peer: provider and limits of a part.

    Attributes:
        provider: its name, such as "shm" (`weft doctor` lists them).
        max_part_bytes: the most bytes of a part of a write; `None` if writes are not cut.
        max_pages_per_part: the most pages of one; `None` likewise.
    """

    provider: str
    max_part_bytes: int | None
    max_pages_per_part: int | None


class Statistics(NamedTuple):
    """Traffic with one peer since the communicator was made.

    Attributes:
        peer: its rank.
        provider: of the route to it.
        bytes: payload sent to it.
        parts: sent to it, signals and credits included.
        arrivals: looks at its lanes that found them risen; several raises may be one arrival.
        errors: parts to it that failed.
    """

    peer: int
    provider: str
    bytes: int
    parts: int
    arrivals: int
    errors: int
