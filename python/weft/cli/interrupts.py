"""Signals that end the command: last line, exit status, and time limit.

SIGINT, SIGTERM and SIGHUP raise `Interrupted` in the main thread, so that temporary files are
removed and children are ended. Native computations let handlers run. A command that still runs
`END_SECONDS` after a signal is cut off.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Interrupted", "ended_by_signals", "ends_soon"]

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Time for the command to clean up.
END_SECONDS: Final = 1.5


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number

    @property
    def status(self) -> int:
        """Exit status that a shell reports after the signal: 130 for SIGINT."""
        return 128 + self.number


class Ending:
    """Command state: no signal yet, ending, or ended."""

    def __init__(self) -> None:
        self.begun = False
        self.done = False

    def handle(self, number: int, _: Any) -> None:
        """Raise `Interrupted`; a second signal ends the process at once."""
        if self.begun:
            os._exit(128 + number)
        self.begun = True
        ends_soon(number, self)
        raise Interrupted(number)


def ends_soon(number: int, ending: Ending | None = None, after: float = END_SECONDS) -> None:
    """End the process after some seconds, unless `ending` is done by then."""

    def end() -> None:
        time.sleep(after)
        if ending is None or not ending.done:
            with contextlib.suppress(OSError):
                os.write(2, f"weft: {Interrupted(number)}\n".encode())
            os._exit(128 + number)

    # Without `threading` locks: a handler may run while the main thread holds them.
    with contextlib.suppress(RuntimeError):
        _thread.start_new_thread(end, ())


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise `Interrupted` for a signal that ends the command, unless the process ignores it."""
    ending = Ending()
    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.getsignal(number) for number in ENDING}
    try:
        for number, handler in previous.items():
            # A handler that was not set by Python could not be restored.
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, ending.handle)
        yield
    finally:
        ending.done = True
        for number, handler in previous.items():
            if handler is not None:
                signal.signal(number, handler)
