"""Stream order on a shared channel: which stream a call waits for.

Calls on a channel are ordered: one call's kernels must have ended before the next call's kernels
begin. On one stream they do. For calls on several streams:

- *Eager after eager*: the call's stream waits for the stream of the last eager call on the channel,
  even if others were captured in between.
- *Captured after captured, in one capture*: the call's stream waits for the stream of the last call
  on the channel, as a graph edge.
- *All else* (captured after eager, or in another capture; eager while the other stream is being
  captured): no wait, since captured work can only wait for work in the same capture. The replay
  counts: that stream must come after all earlier work on the channels that the graph uses. One
  stream for all replays and eager calls is enough; graphs replayed at the same time need separate
  channels (`channel=`).

All-to-all kernels detect calls that overlap, or come out of order, as soon as the second begins,
and end the group; collective kernels do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ChannelOrder"]


class _Stream(Protocol):
    def wait_stream(self, stream: Any, /) -> None: ...


class ChannelOrder:
    """Streams that the last calls on a channel used.

    Args:
        is_capturing: returns true for a stream that is being captured.
    """

    def __init__(self, is_capturing: Callable[[Any], bool]) -> None:
        self._is_capturing = is_capturing
        self._eager: Any = None
        self._captured: Any = None

    def follow(self, stream: _Stream, capturing: bool | None = None) -> None:
        """Put `stream` behind the last call that a call on it has to come after.

        Args:
            stream: the call's stream.
            capturing: true if it is being captured; if not given, torch is asked, which takes
                longer than the rest of a call.
        """
        if capturing is None:
            capturing = self._is_capturing(stream)
        if capturing:
            last, self._captured = self._captured, stream
        else:
            last, self._eager = self._eager, stream
        # A stream whose capture has ended is not part of this capture, and a wait for a capturing
        # stream would add the eager stream to that capture.
        if last is not None and last != stream and self._is_capturing(last) == capturing:
            stream.wait_stream(last)
