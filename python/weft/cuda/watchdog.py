"""A thread that looks for what a device recorded, since nobody waits for it."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Final

from weft.errors import CapacityError, ClosedError, ExpertError, WeftError

if TYPE_CHECKING:
    from weft.cuda.all_to_all import AllToAll

__all__ = ["Watchdog"]

#: Seconds between looks.
PERIOD: Final = 0.1

logger = logging.getLogger("weft.cuda")


class Watchdog:
    """Looks at an all-to-all until it is closed or gone, and tells the log.

    A look that finds why the group is dead tells all ranks of it: the native module does that.
    """

    def __init__(self, all_to_all: AllToAll) -> None:
        self._all_to_all = weakref.ref(all_to_all)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._noticed: list[WeftError] = []
        self._thread = threading.Thread(target=self._run, name="weft watchdog", daemon=True)
        self._thread.start()

    def raise_noticed(self) -> None:
        """Raise the first of what was found, would not be found again, and was not raised here."""
        with self._lock:
            if self._noticed:
                raise self._noticed.pop(0)

    def stop(self) -> None:
        """Look no more; returns once the thread does nothing any more."""
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
            # Nothing here keeps it alive between looks.
            del all_to_all
