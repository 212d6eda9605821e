"""Route to a peer, and traffic statistics."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Route", "Statistics"]


class Route(NamedTuple):
    """Route to a peer: provider and limits per part.

    Attributes:
        provider: provider name, such as "shm" (`weft doctor` lists them).
        max_part_bytes: maximum bytes per part of a write; `None` if writes are not cut.
        max_pages_per_part: maximum pages per part; `None` likewise.
    """

    provider: str
    max_part_bytes: int | None
    max_pages_per_part: int | None


class Statistics(NamedTuple):
    """Traffic with one peer since the communicator was made.

    Attributes:
        peer: the peer's rank.
        provider: provider for this route.
        bytes: payload bytes sent.
        parts: parts sent, including signals and credits.
        arrivals: polls that found a lane risen; one arrival may stand for several raises.
        errors: parts that failed.
    """

    peer: int
    provider: str
    bytes: int
    parts: int
    arrivals: int
    errors: int
