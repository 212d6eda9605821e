"""Counters by the public path."""

from weft.group.counter import Counter

__all__ = ["Counter"]
