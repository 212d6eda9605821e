"""Ranks by host, and rank numbers in sub-group errors."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from weft.base.errors import ConfigurationError, GroupPoisonedError, WeftError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.group.communicator import Communicator

__all__ = ["Hierarchy", "cause", "renumbered"]

#: Seconds until a rank loss reaches all groups with that rank.
GRACE: Final = 2.0


@dataclass(frozen=True)
class Hierarchy:
    """Ranks by host: hosts ordered by lowest rank, ranks in order on each host.

    Attributes:
        hosts: ranks on each host, equally many.
        host: this rank's host index.
        local: this rank's number on the host.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    local: int

    @staticmethod
    def of(names: Sequence[str], rank: int) -> Hierarchy:
        """Hierarchy for ranks whose hosts have these identities.

        Raises:
            ConfigurationError: if hosts have different rank counts.
        """
        found: dict[str, list[int]] = {}
        for each, name in enumerate(names):
            found.setdefault(name, []).append(each)
        if len({len(ranks) for ranks in found.values()}) != 1:
            counts = ", ".join(f"{name} {len(ranks)}" for name, ranks in found.items())
            raise ConfigurationError(
                f"ranks of each host: {counts}; expected equal numbers; start as many ranks on "
                "each host"
            )
        own = found[names[rank]]
        hosts = tuple(tuple(ranks) for ranks in found.values())
        return Hierarchy(hosts, list(found).index(names[rank]), own.index(rank))

    @property
    def within(self) -> tuple[int, ...]:
        """Ranks on this host."""
        return self.hosts[self.host]

    @property
    def across(self) -> tuple[int, ...]:
        """Ranks with this rank's local number, by host."""
        return tuple(ranks[self.local] for ranks in self.hosts)

    @property
    def order(self) -> list[int]:
        """All ranks by local number, then by host."""
        return [rank for local in zip(*self.hosts, strict=True) for rank in local]

    def place(self, rank: int) -> tuple[int, int]:
        """Host index and local number for a rank."""
        for host, ranks in enumerate(self.hosts):
            if rank in ranks:
                return host, ranks.index(rank)
        raise LookupError(rank)


def renumbered(error: WeftError, ranks: Sequence[int]) -> WeftError:
    """A sub-group error with whole-group rank numbers.

    Args:
        error: sub-group error.
        ranks: whole-group ranks, by sub-group rank.
    """

    def number(rank: int) -> int:
        return ranks[rank] if 0 <= rank < len(ranks) else rank

    def numbers(found: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda each: str(number(int(each[0]))), found[0])

    text = re.sub(r"\branks? \d+(?:(?:, | and |, and )\d+\b)*", numbers, str(error))
    made = type(error)(text)
    made.rank = None if error.rank is None else number(error.rank)
    made.missing = [(number(rank), *rest) for rank, *rest in error.missing]  # type: ignore[misc]
    return made


def cause(error: WeftError, ranks: Sequence[int], whole: Communicator) -> WeftError:
    """The whole-group error for a sub-group error.

    The whole group detects a rank loss itself, at about the same time; that error is preferred,
    since a sub-group error may be a consequence of another sub-group's error.
    """
    until = time.monotonic() + GRACE
    while isinstance(error, GroupPoisonedError):
        try:
            whole.check()
        except GroupPoisonedError as known:
            return known
        if time.monotonic() >= until:
            break
        time.sleep(0.01)
    return renumbered(error, ranks)
