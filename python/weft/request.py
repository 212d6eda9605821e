"""Requests: writes in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from weft._timeout import seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft import _native

__all__ = ["Done", "Request"]

#: Callback at the end of a request: its argument is `None`, or the error if it failed.
Done: TypeAlias = "Callable[[Exception | None], object]"


class Request:
    """A write in flight."""

    def __init__(self, native: _native.Request) -> None:
        self._native = native

    @property
    def done(self) -> bool:
        """True if the source may be reused and the bytes have left this process.

        Only the peer's response confirms arrival. A poisoned group releases every source, so this
        is then true for failed writes too; `wait` raises the error of those.
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
