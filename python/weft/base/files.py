"""Bounded, non-blocking reads from files that users name: regular files, up to a limit."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MAX_BYTES", "read_bytes", "read_text"]

#: Default maximum for text: 64 MiB, a scenario with some million ranks.
MAX_BYTES: Final = 64 << 20


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Contents of a regular file, at most `limit` bytes.

    Opening a pipe waits for a writer, and a device may be read without end. `/proc` files are
    regular files without a length, so the limit also holds while reading.

    Raises:
        OSError: if it is another kind of file, longer, or cannot be read.
    """
    # Opening some devices has effects, so the kind is checked before, too.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path}: expected a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with open(descriptor, "rb", buffering=0) as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{path}: expected a regular file")
        if about.st_size > limit:
            raise OSError(f"{path}: {about.st_size} bytes; expected at most {limit}")
        parts, left = [], limit + 1
        # None: a /proc file without data now.
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        if not left:
            raise OSError(f"{path}: more than {limit} bytes; expected at most {limit}")
        return b"".join(parts)


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """UTF-8 text in a regular file, at most `limit` bytes.

    Raises:
        OSError: as in `read_bytes`.
        UnicodeDecodeError: if it is not UTF-8.
    """
    return read_bytes(path, limit).decode()
