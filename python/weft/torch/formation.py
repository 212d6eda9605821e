"""Group formation: ranks meet at a torch store, until a timeout or an abort.

Stores: https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from weft.base.errors import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

__all__ = ["Formation"]

#: Seconds between two looks at the store: a quarter of the time waited so far, within these bounds.
SHORTEST_PAUSE: Final = 0.001
LONGEST_PAUSE: Final = 0.25


class Formation:
    """All-gather for small records over a torch store, with one time limit for the whole formation.

    A rank that fails leaves the reason at the store, which ends the formation at the others.

    Args:
        store: reaches all ranks in the group; the keys belong to this group.
        rank: this rank.
        size: ranks in the group.
        timeout: for the whole formation.
        aborts: number of aborts in this process so far; another one ends the formation.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, aborts: Callable[[], int]
    ) -> None:
        self.rank, self.size = rank, size
        self.aborts, self.aborts_before = aborts, aborts()
        self.start, self.limit = time.monotonic(), timeout.total_seconds()
        self.checked_at = self.start
        self.step = 0
        # A store may outlive a group and serve the next one with the same name.
        attempt = of_store(store.add, f"weft/attempts/{rank}", 1)
        self.prefix = f"weft/{attempt}"
        self.store: Any = store

    def left(self) -> float:
        """Seconds until the limit."""
        return max(self.start + self.limit - time.monotonic(), 0.0)

    def gather(self, payload: bytes) -> list[bytes]:
        """Payloads from all ranks, in rank order.

        Raises:
            RendezvousError: names the ranks that did not come in time, or the rank that failed.
        """
        keys = [f"{self.prefix}/{self.step}/{each}" for each in range(self.size)]
        self.step += 1
        # A rank that comes late finds the records from ranks that have given up.
        self.check(at_once=True)
        of_store(self.store.set, keys[self.rank], payload)
        start = time.monotonic()
        while not self.has(keys):
            first = next((each for each in keys if not self.has([each])), keys[-1])
            while not self.has([first]):
                self.check()
                waited = time.monotonic() - start
                if self.left() == 0:
                    raise RendezvousError(
                        f"{self.missing(keys)} did not come to the store within "
                        f"{self.limit:g} s; check that they run and make the same process groups "
                        "in the same order"
                    )
                # Waits on a store cannot be ended, and log timeouts.
                time.sleep(min(max(waited / 4, SHORTEST_PAUSE), LONGEST_PAUSE, self.left()))
        return [of_store(self.store.get, each) for each in keys]

    def has(self, keys: list[str]) -> bool:
        """True if all keys are at the store."""
        return bool(of_store(self.store.check, keys))

    def missing(self, keys: list[str]) -> str:
        """Text that names the ranks whose keys are absent."""
        absent = [rank for rank, key in enumerate(keys) if not self.has([key])]
        return f"rank{'s' * (len(absent) != 1)} {', '.join(map(str, absent))}"

    def check(self, *, at_once: bool = False) -> None:
        """Raise if this process has aborted, or another rank has failed.

        Args:
            at_once: look at the store even if it was looked at just before.

        Raises:
            RendezvousError: names the rank and the reason.
        """
        if self.store is None:
            return
        if self.aborts() != self.aborts_before:
            raise RendezvousError("aborted by this process while the process group was formed")
        now = time.monotonic()
        if now - self.checked_at < LONGEST_PAUSE and not at_once:
            return
        self.checked_at = now
        if self.has([f"{self.prefix}/failed"]):
            reason = of_store(self.store.get, f"{self.prefix}/failed").decode(errors="replace")
            raise RendezvousError(reason)

    def fail(self, error: BaseException) -> None:
        """Leave the failure reason to the other ranks."""
        with contextlib.suppress(RuntimeError):
            if not self.store.check([f"{self.prefix}/failed"]):
                text = " ".join(str(error).split()) or type(error).__name__
                self.store.set(f"{self.prefix}/failed", f"rank {self.rank} gave up: {text}")
        self.end()

    def end(self) -> None:
        """Drop the store; checks no longer raise."""
        self.store = None


def of_store(call: Callable[..., Any], *arguments: Any) -> Any:
    """A store call's result.

    Raises:
        RendezvousError: if the store fails.
    """
    try:
        return call(*arguments)
    except RuntimeError as error:
        raise store_failed(error) from error


def store_failed(error: RuntimeError) -> RendezvousError:
    """Error for a store that fails, for example one whose process has ended."""
    cause = (str(error).splitlines() or [""])[0]
    return RendezvousError(
        f"the store of the process group failed: {cause}; check the process that holds it"
    )
