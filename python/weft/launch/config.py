"""Configuration of a launch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["GRACE_SECONDS", "LaunchConfig"]

GRACE_SECONDS: Final = 10.0


@dataclass(frozen=True)
class LaunchConfig:
    """Command, ranks and options of a launch. Raises `ValueError` for an invalid one."""

    command: Sequence[str]
    ranks: int
    #: Number of pretended hosts, in blocks of ranks, without shared memory; None: one real host.
    pretended_hosts: int | None = None
    #: Name of each rank's host, pretended likewise; instead of a number of hosts.
    hosts: Sequence[str] | None = None
    #: Set in every rank, over the launcher's own environment.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Put the rank before each line of output; otherwise ranks inherit the launcher's streams.
    prefix: bool = True
    #: Time for the other ranks to end after a rank has failed or the launcher was signalled.
    grace_seconds: float = GRACE_SECONDS

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("no command: expected one after --")
        if self.ranks < 1:
            raise ValueError(f"cannot start {self.ranks} ranks: expected at least 1")
        if self.pretended_hosts is not None and not 1 <= self.pretended_hosts <= self.ranks:
            raise ValueError(
                f"cannot split {self.ranks} ranks into {self.pretended_hosts} hosts:"
                f" expected 1 to {self.ranks}, a rank on each host"
            )
        if self.hosts is not None and self.pretended_hosts is not None:
            raise ValueError("a network already sets the pretended hosts: give one of both")
        if self.hosts is not None and len(self.hosts) != self.ranks:
            raise ValueError(f"{len(self.hosts)} hosts for {self.ranks} ranks: expected one each")
        if not self.grace_seconds >= 0:
            raise ValueError(f"grace {self.grace_seconds}: expected seconds from 0 on")
