"""Ranks of a communicator by host, and the numbers of ranks in errors of its sub-groups."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from weft.errors import ConfigurationError, GroupPoisonedError, WeftError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.communicator import Communicator

__all__ = ["Hierarchy", "cause", "renumbered"]

#: Seconds in which the loss of a rank reaches all groups that it is a member of.
GRACE: Final = 2.0


@dataclass(frozen=True)
class Hierarchy:
    """Ranks by host: hosts in the order of their lowest ranks, ranks of a host in order.

    Attributes:
        hosts: ranks of each host, equally many.
        host: index of this rank's host.
        local: number of this rank on its host.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    local: int

    @staticmethod
    def of(names: Sequence[str], rank: int) -> Hierarchy:
        """Hierarchy of ranks whose hosts have these identities.

        Raises:
            ConfigurationError: if hosts have different numbers of ranks.
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
        """Ranks of this host."""
        return self.hosts[self.host]

    @property
    def across(self) -> tuple[int, ...]:
        """Ranks with this rank's number on their hosts, by host."""
        return tuple(ranks[self.local] for ranks in self.hosts)

    @property
    def order(self) -> list[int]:
        """All ranks by number on their host, then by host."""
        return [rank for local in zip(*self.hosts, strict=True) for rank in local]

    def place(self, rank: int) -> tuple[int, int]:
        """Index of a rank's host, and its number there."""
        for host, ranks in enumerate(self.hosts):
            if rank in ranks:
                return host, ranks.index(rank)
        raise LookupError(rank)


def renumbered(error: WeftError, ranks: Sequence[int]) -> WeftError:
    """An error of a sub-group, with ranks as they are numbered in the whole group.

    Args:
        error: of the sub-group.
        ranks: of the whole group, by rank of the sub-group.
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
    """The error of a sub-group as that of the whole group.

    The whole group detects the loss of a rank itself, at about the same time; its error is
    preferred, since that of a sub-group may be the consequence of another sub-group's.
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
