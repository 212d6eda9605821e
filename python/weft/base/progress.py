"""Progress line for commands that take longer than two seconds."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TextIO

__all__ = ["Progress", "TerminalLine"]

SHOWN_AFTER_SECONDS: Final = 2.0
REDRAWN_EVERY_SECONDS: Final = 0.1
ERASE_LINE: Final = "\r\x1b[K"


class TerminalLine:
    """A line that is redrawn in place, and erased when the context ends.

    It is silent unless `stream` is a terminal and `enabled` is true.
    """

    def __init__(self, enabled: bool, stream: TextIO | None) -> None:
        self.stream = stream or sys.stderr
        self.enabled = enabled and self.stream.isatty()
        self.shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.shown:
            self.stream.write(ERASE_LINE)
            self.stream.flush()

    def draw(self, text: str) -> None:
        """Replace the line."""
        self.shown = True
        self.stream.write(ERASE_LINE + text)
        self.stream.flush()


class Progress(TerminalLine):
    """Progress line on a terminal: steps done out of `total`, and the time left.

    Use it as a context manager and call `advance`. The line is shown after two seconds, unless
    `stream` is no terminal or `enabled` is false (pass `not arguments.json`), and erased at the
    end.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(enabled, stream)
        self.label = label
        self.total = total
        self.done = 0
        self.clock = clock
        self.started = clock()
        self.next_drawing = self.started + SHOWN_AFTER_SECONDS

    def advance(self, steps: int = 1) -> None:
        """Add steps to those done."""
        self.done += steps
        now = self.clock()
        if self.enabled and now >= self.next_drawing:
            self.next_drawing = now + REDRAWN_EVERY_SECONDS
            self.draw(self.line(now))

    def line(self, now: float) -> str:
        """Progress line text at this time."""
        share = min(1.0, self.done / self.total) if self.total else 1.0
        text = f"{self.label}  {self.done:,} of {self.total:,}  {share:.0%}"
        if 0 < self.done < self.total:
            left = (now - self.started) / self.done * (self.total - self.done)
            text += f"  {left:.0f} s left"
        return text
