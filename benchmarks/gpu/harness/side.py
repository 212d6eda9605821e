"""Sides: libraries, or algorithms in them, and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from harness.context import Context

__all__ = ["ALIGNMENT", "Arena", "Side"]

#: Buffer alignment in an arena, in bytes.
ALIGNMENT: Final = 4096


class Side:
    """A library, or one algorithm in it."""

    name = ""
    #: Weft's sides are checked bit for bit, and if they fail, the case fails.
    ours = False

    def __init__(self, context: Context) -> None:
        self.context, self.torch = context, context.device.torch
        self.is_ready = False

    def ready(self) -> None:
        """Set up the library, once."""
        if not self.is_ready:
            self.start()
            self.is_ready = True

    def unable(self, case: Any) -> str | None:
        """Reason for which the side does not take part; None if it does."""
        return None

    def start(self) -> None:
        """Set up the library; a collective call."""

    def check(self) -> None:
        """Raise the error that the device recorded, after `synchronise`."""

    def bind(self, case: Any) -> Any:
        """Allocate buffers and return the calls; a collective call."""
        raise NotImplementedError

    def memory(self, elements: int) -> Any:
        """An uninitialised buffer."""
        name = self.context.device.name
        return self.torch.empty(elements, dtype=self.context.dtype, device=name)


class Arena:
    """One allocation; every case gets parts from it, at the same offsets on all ranks."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.used = memory, 0

    def take(self, elements: int) -> Any:
        """The next part."""
        begin = self.used
        self.used = -(-(begin + 2 * elements) // ALIGNMENT) * ALIGNMENT
        return self.memory[begin // 2 : begin // 2 + elements]
