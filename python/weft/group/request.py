"""Requests: writes in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from weft.base.timeout import seconds
from weft.group.event_loop import ended

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from weft import _native

__all__ = ["Done", "Request"]

#: Callback for when a request ends or a counter reaches a count: the argument is `None`, or the
#: error if it failed.
Done: TypeAlias = "Callable[[Exception | None], object]"


class Request:
    """A write in flight; `await request` is `wait_async` with the default timeout."""

    def __init__(self, native: _native.Request) -> None:
        self._native = native

    @property
    def done(self) -> bool:
        """True if the source may be reused and the bytes have left this process.

        Only the peer's response confirms arrival. A poisoned group releases every source, so this
        is then true for failed writes too; `wait` raises the error for them.
        """
        return self._native.done()

    def wait(self, *, timeout: float = 30.0) -> None:
        """Wait until the source may be reused and the bytes have left this process.

        The operating system has them then, or the peer's memory: no later call is needed for them.

        Args:
            timeout: seconds; finite.

        Raises:
            GroupPoisonedError: or the subclass that names the cause, if the group was poisoned
                before the write had ended: its outcome is unknown. A write that had ended before
                the poison does not raise.
        """
        self._native.wait(seconds(timeout))

    async def wait_async(self, *, timeout: float = 30.0) -> None:
        """`wait` without blocking the running asyncio loop.

        Cancel it to give up; the write goes on. It returns, as `wait` does, once the source may be
        reused: only the peer's response confirms arrival.

        Args:
            timeout: seconds; finite.

        Raises:
            WaitTimeoutError: after `timeout`. The write goes on, and the call may be repeated.
            GroupPoisonedError: as in `wait`.
            ClosedError: if the communicator is closed first.
        """
        await ended(self._native.start_await, seconds(timeout))

    def __await__(self) -> Generator[Any, None, None]:
        return self.wait_async().__await__()
