"""Live view for a test or a node: counts and rates in one terminal line."""

import time
from collections.abc import Callable
from typing import Final, TextIO

from weft.base.progress import TerminalLine

__all__ = ["LiveView"]

REDRAWN_EVERY_SECONDS: Final = 0.5


class LiveView(TerminalLine):
    """One line with the queries so far and the rate since the last line.

    Use it as a context manager. It is silent unless `stream` is a terminal and `enabled` is true.
    """

    def __init__(
        self,
        peers: str,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(enabled, stream)
        self.peers = peers
        self.clock = clock
        self.drawn = clock()
        self.answered = 0

    def show(self, issued: int, answered: int, failed: int, peers: int) -> None:
        """Show counts, unless the line was drawn just before."""
        now = self.clock()
        passed = now - self.drawn
        if not self.enabled or passed < REDRAWN_EVERY_SECONDS:
            return
        rate = (answered - self.answered) / passed
        self.drawn, self.answered = now, answered
        under_way = max(0, issued - answered - failed)
        self.draw(
            f"{answered:,} answered  {rate:,.0f}/s  {under_way:,} under way"
            f"  {failed:,} failed  {peers} {self.peers}"
        )
