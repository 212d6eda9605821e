"""Protocols for objects that a group holds, checks or watches."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Checked", "Resource", "Watched"]


class Resource(Protocol):
    """An object that was made on a communicator and ends with it, such as an all-to-all."""

    def _abandon(self) -> None:
        """Close on this rank only, without waiting for the others."""


class Checked(Protocol):
    """Device object that records errors until they are asked for."""

    def check(self) -> None:
        """Raise the error that the device recorded."""


class Watched(Protocol):
    """Device object whose native part a `Watchdog` polls."""

    @property
    def _native(self) -> Checked: ...

    @property
    def rank(self) -> int:
        """This rank, for the log."""
