"""Libraries that Weft loads at run time when they are present, and works without."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

from weft.diagnosis.finding import Finding

NOT_USED_YET: Final = "present, but this version does not use it yet"


def gdrcopy() -> Finding:
    """Access from the CPU to GPU memory."""
    follows = "the CPU reaches GPU memory by the driver's slower copies"
    if load("libgdrapi.so.2") is None:
        return Finding("gdrcopy", False, "not installed", follows)
    if not Path("/dev/gdrdrv").exists():
        return Finding("gdrcopy", False, "its kernel module is not loaded", follows)
    return Finding("gdrcopy", True, "/dev/gdrdrv", NOT_USED_YET)


LOOKS: Final = (gdrcopy,)


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
