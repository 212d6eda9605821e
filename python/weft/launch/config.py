"""Launch configuration."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from weft.launch.limits import MOST_RANKS, check_limits

__all__ = ["GRACE_SECONDS", "LaunchConfig"]

GRACE_SECONDS: Final = 10.0


@dataclass(frozen=True)
class LaunchConfig:
    """Command, ranks and options for a launch. Raises `ValueError` for an invalid one."""

    command: Sequence[str]
    ranks: int
    #: Pretended hosts, in rank blocks, without shared memory; None: one real host.
    pretended_hosts: int | None = None
    #: Name of each rank's host, also pretended; replaces a host count.
    hosts: Sequence[str] | None = None
    #: Set in every rank, over the launcher's own environment.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Put the rank before each output line; otherwise ranks inherit the launcher's streams.
    prefix: bool = True
    #: Time for the other ranks to end after a rank has failed or the launcher was signalled.
    grace_seconds: float = GRACE_SECONDS
    #: Signal that ends the ranks; None: the one that the launcher gets.
    ended_by: signal.Signals | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("no command: expected one after --")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"{self.ranks} ranks: expected 1 to {MOST_RANKS}")
        if self.pretended_hosts is not None and not 1 <= self.pretended_hosts <= self.ranks:
            raise ValueError(
                f"cannot split {self.ranks} ranks into {self.pretended_hosts} hosts:"
                f" expected 1 to {self.ranks}, a rank on each host"
            )
        if self.hosts is not None and self.pretended_hosts is not None:
            raise ValueError("a network already sets the pretended hosts: give only one")
        if self.hosts is not None and len(self.hosts) != self.ranks:
            raise ValueError(f"{len(self.hosts)} hosts for {self.ranks} ranks: expected one each")
        if not self.grace_seconds >= 0:
            raise ValueError(f"grace {self.grace_seconds}: expected seconds from 0 on")
        check_limits(self)
