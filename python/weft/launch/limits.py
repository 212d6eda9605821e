"""Machine limits on a launch: descriptors, processes."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MOST_RANKS", "check_limits", "descriptors_for"]

#: Most ranks in a group.
MOST_RANKS: Final = 65_536
#: Descriptors beside the ranks': streams, signals, the guardian, a rank's start.
OTHER_DESCRIPTORS: Final = 64
PID_MAX: Final = Path("/proc/sys/kernel/pid_max")
#: This container's process limit, and the present process count.
PIDS_MAX: Final = Path("/sys/fs/cgroup/pids.max")
PIDS_CURRENT: Final = Path("/sys/fs/cgroup/pids.current")


class Launch(Protocol):
    """The part of a `LaunchConfig` on which limits depend."""

    @property
    def ranks(self) -> int: ...

    @property
    def prefix(self) -> bool: ...


def check_limits(config: Launch) -> None:
    """Check that this machine can have as many ranks.

    Raises:
        ValueError: if it cannot, with the limit and the remedy.
    """
    ranks = config.ranks
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and descriptors(config) > most:
        remedy = "" if not config.prefix else ", or pass --no-prefix"
        raise ValueError(
            f"{ranks} ranks: they need {descriptors(config)} descriptors of the launcher, and the"
            f" hard limit is {most}; raise it (ulimit -Hn){remedy}"
        )
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and processes != resource.RLIM_INFINITY and ranks >= processes:
        raise ValueError(
            f"{ranks} ranks: the limit of processes is {processes}; raise it (ulimit -u)"
        )
    highest = number_in(PID_MAX)
    if highest is not None and ranks >= highest:
        raise ValueError(f"{ranks} ranks: process numbers end at {highest}; raise {PID_MAX}")
    allowed = number_in(PIDS_MAX)
    if allowed is not None and ranks + (number_in(PIDS_CURRENT) or 0) > allowed:
        raise ValueError(
            f"{ranks} ranks: the control group allows {allowed} processes; raise {PIDS_MAX}"
        )


def descriptors(config: Launch) -> int:
    """Descriptors that the launcher needs: for a process, and with a prefix two pipes."""
    return (3 if config.prefix else 1) * config.ranks + OTHER_DESCRIPTORS


@contextlib.contextmanager
def descriptors_for(config: Launch) -> Iterator[tuple[int, int]]:
    """Raise the soft limit of descriptors as far as needed; yields the limits that ranks get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    short = soft != resource.RLIM_INFINITY and soft < descriptors(config)
    if short:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(config), hard))
    try:
        yield soft, hard
    finally:
        if short:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def number_in(path: Path) -> int | None:
    """Number in a kernel file; None without the file, or for `max`."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
