"""Pairs by the public path."""

from weft.group.pair import Listener, connect, connect_async, listen

__all__ = ["Listener", "connect", "connect_async", "listen"]
