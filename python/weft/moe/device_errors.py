"""Errors that devices recorded, in any all-to-all of this process."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from weft.moe.all_to_all import AllToAll

__all__ = ["check"]

#: Open all-to-alls on devices.
ON_DEVICES: Final[weakref.WeakSet[AllToAll]] = weakref.WeakSet()


def check() -> None:
    """Raise an error that a device recorded, in any open all-to-all of this process.

    Errors of collectives and of kernels with a context of `weft.triton` are included.

    Calls on a device do not wait on the host, so its errors are only recorded: call this after a
    step, when its stream was synchronised. Also called `weft.check`.

    Raises:
        WaitTimeoutError, PeerLostError, StageError: a wait on the device timed out, and outputs are
            NaN (all bytes 0xFF) from this round on.
        ExpertError, CapacityError: of a round that is over; they are cleared once raised.
    """
    for all_to_all in list(ON_DEVICES):
        all_to_all.check()
