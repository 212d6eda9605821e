"""Watchdog: a thread that polls a device object for errors that the device recorded."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Final

from weft.base import threads
from weft.base.errors import CapacityError, ClosedError, ExpertError, WeftError

if TYPE_CHECKING:
    from weft.group.resource import Watched

__all__ = ["Watchdog"]

#: Seconds between polls.
PERIOD: Final = 0.1

logger = logging.getLogger("weft.cuda")


class Watchdog:
    """Polls an all-to-all, or collectives, until they are closed or dropped, and logs errors.

    A poll that finds an error which ends the group poisons it at all ranks, in the native module.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = weakref.ref(watched)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._noticed: list[WeftError] = []
        self._thread = threading.Thread(target=self._run, name="weft watchdog", daemon=True)
        threads.start(self._thread)

    def raise_noticed(self) -> None:
        """Raise the oldest error that the device cleared and that was not raised yet."""
        with self._lock:
            if self._noticed:
                raise self._noticed.pop(0)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD):
            watched = self._watched()
            if watched is None:
                return
            try:
                watched._native.check()
            except ClosedError:
                return
            except (ExpertError, CapacityError) as error:
                logger.warning("rank %d: %s", watched.rank, error)
                with self._lock:
                    self._noticed.append(error)
            except WeftError as error:
                logger.error("rank %d: %s", watched.rank, error)
                return
            # The thread does not keep it alive between polls.
            del watched
