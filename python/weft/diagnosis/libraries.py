"""Libraries that are loaded by name, and the wording of counts."""

from __future__ import annotations

import ctypes

__all__ = ["load", "plural"]


def load(*names: str) -> ctypes.CDLL | None:
    """The first installed library among these."""
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def plural(count: int, noun: str) -> str:
    """A count with a noun, for example "2 ports"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
