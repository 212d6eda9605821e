"""Watchdog: a thread that polls an all-to-all for errors that its device recorded."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Final

from weft.errors import CapacityError, ClosedError, ExpertError, WeftError

if TYPE_CHECKING:
    from weft.cuda.all_to_all import AllToAll

__all__ = ["Watchdog"]

#: Seconds between polls.
PERIOD: Final = 0.1

logger = logging.getLogger("weft.cuda")


class Watchdog:
    """Polls an all-to-all until it is closed or dropped, and logs its errors.

    A poll that finds an error which ends the group poisons it at all ranks, in the native module.
    """

    def __init__(self, all_to_all: AllToAll) -> None:
        self._all_to_all = weakref.ref(all_to_all)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._noticed: list[WeftError] = []
        self._thread = threading.Thread(target=self._run, name="weft watchdog", daemon=True)
        self._thread.start()

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
            all_to_all = self._all_to_all()
            if all_to_all is None:
                return
            try:
                all_to_all._native.check()
            except ClosedError:
                return
            except (ExpertError, CapacityError) as error:
                logger.warning("rank %d: %s", all_to_all.rank, error)
                with self._lock:
                    self._noticed.append(error)
            except WeftError as error:
                logger.error("rank %d: %s", all_to_all.rank, error)
                return
            # The thread does not keep it alive between polls.
            del all_to_all
