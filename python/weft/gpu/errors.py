"""Errors that devices recorded, in any all-to-all in this process."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from weft.group.resource import Checked

__all__ = ["check"]

#: Open device all-to-alls.
ON_DEVICES: Final[weakref.WeakSet[Checked]] = weakref.WeakSet()


def check() -> None:
    """Raise an error that a device recorded, in any open all-to-all in this process.

    This includes errors from collectives and from kernels with a `weft.triton` context.

    Calls on a device do not wait on the host, so errors are only recorded: call this after a
    step, when the stream was synchronised. Also called `weft.check`.

    Raises:
        WaitTimeoutError, PeerLostError, StageError: a wait on the device timed out, and outputs are
            NaN (all bytes 0xFF) from this round on.
        ExpertError, CapacityError: for a round that is over; they are cleared once raised.
    """
    for all_to_all in list(ON_DEVICES):
        all_to_all.check()
