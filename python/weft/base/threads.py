"""Thread start, with a Weft error where the system has no threads left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.base.errors import LimitError

if TYPE_CHECKING:
    from threading import Thread

__all__ = ["start", "unavailable"]


def start(thread: Thread) -> None:
    """Start a thread.

    Raises:
        LimitError: if the system cannot start another one.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise unavailable(thread.name, error) from None


def unavailable(name: str, error: RuntimeError) -> LimitError:
    """Error for a thread that cannot be started."""
    return LimitError(
        f"thread {name}: {error}; raise the limit of processes (ulimit -u, pids.max of the "
        "cgroup), or start fewer"
    )
