"""Launch outcome: exits by rank."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LaunchError", "Outcome", "RankExit"]


class LaunchError(Exception):
    """The command cannot be started, or the ranks could not find each other."""

    def __init__(self, problem: str, cause: OSError) -> None:
        super().__init__(f"{problem}: {cause.strerror}")
        #: The exit status a shell would report.
        self.status = 127 if isinstance(cause, FileNotFoundError) else 126


@dataclass(frozen=True)
class RankExit:
    """Exit by one rank."""

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
    """Exits by all ranks."""

    ranks: Sequence[RankExit]
    first_failure: RankExit | None
    #: The first signal that came to end the launch.
    signal: int | None = None
    #: Ranks that were not started, since the launch had ended.
    not_started: int = 0

    @property
    def status(self) -> int:
        """The first failing rank's status; 0 if none failed, unless a signal kept ranks away."""
        if self.first_failure is not None:
            return self.first_failure.status
        return 128 + self.signal if self.signal is not None and self.not_started else 0
