"""What to start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["GRACE_SECONDS", "LaunchConfig"]

GRACE_SECONDS: Final = 10.0


@dataclass(frozen=True)
class LaunchConfig:
    """What to start. Raises `ValueError` when it cannot be started."""

    command: Sequence[str]
    ranks: int
    #: Split the ranks into so many hosts that share nothing, in blocks; None means one real host.
    pretended_hosts: int | None = None
    #: Set in every rank, over the launcher's own environment.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Put the rank before each line of output; otherwise ranks inherit the launcher's streams.
    prefix: bool = True
    #: How long the others have to end once a rank has failed or the launcher was signalled.
    grace_seconds: float = GRACE_SECONDS

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("no command: say what to start after --")
        if self.ranks < 1:
            raise ValueError(f"cannot start {self.ranks} ranks: at least 1 is needed")
        if self.pretended_hosts is not None and not 1 <= self.pretended_hosts <= self.ranks:
            raise ValueError(
                f"cannot split {self.ranks} ranks into {self.pretended_hosts} hosts:"
                f" each host needs a rank, so 1 to {self.ranks} hosts are possible"
            )
        if not self.grace_seconds >= 0:
            raise ValueError(f"the grace cannot be {self.grace_seconds} seconds")
