"""Outcome of a launch: exits of its ranks."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LaunchError", "Outcome", "RankExit"]


class LaunchError(Exception):
    """The command cannot be started."""

    def __init__(self, command: str, cause: OSError) -> None:
        super().__init__(f"cannot start {command}: {cause.strerror}")
        #: The exit status a shell would report.
        self.status = 127 if isinstance(cause, FileNotFoundError) else 126


@dataclass(frozen=True)
class RankExit:
    """Exit of one rank."""

    rank: int
    pid: int
    #: The exit status, or None if a signal ended it.
    exit: int | None
    #: The signal that ended it, or None if it exited.
    signal: int | None
    seconds: float

    @property
    def status(self) -> int:
        """The exit status a shell would report."""
        return self.exit if self.exit is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        if self.signal is not None:
            return f"rank {self.rank} was killed by {signal.Signals(self.signal).name}"
        return f"rank {self.rank} exited with status {self.exit}"


@dataclass(frozen=True)
class Outcome:
    """Exits of all ranks."""

    ranks: Sequence[RankExit]
    first_failure: RankExit | None

    @property
    def status(self) -> int:
        """The first failing rank's status; 0 if none failed."""
        return self.first_failure.status if self.first_failure else 0
