"""The command's standard output: closed, full, without a reader, or with another encoding."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OutputError", "standard_output"]

#: Replacements for table and bar characters that an encoding lacks.
ASCII: Final = str.maketrans("µ█▏▎▍▌▋▊▉", "u#       ")


class OutputError(Exception):
    """Standard output cannot be written.

    Args:
        cause: the system call's error; `None` if standard output is closed.
    """

    def __init__(self, cause: OSError | None) -> None:
        super().__init__(str(cause))
        self.cause = cause

    @property
    def status(self) -> int:
        """Exit status of the command: the same as after SIGPIPE for a lost reader, else 1."""
        left = isinstance(self.cause, BrokenPipeError)
        return 128 + signal.SIGPIPE if left else 1


class RawOutput(io.FileIO):
    """Descriptor whose failed writes raise `OutputError`, unlike other files."""

    def write(self, data: Any) -> int:
        """Write bytes; returns the number written."""
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error) from error


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """Flush standard output at the end, and report its errors in one line.

    Raises:
        OutputError: if standard output is closed, or a write to it fails.
    """
    previous = sys.stdout
    if previous is None:
        report("closed; redirect it to a file or to /dev/null")
        raise OutputError(None)
    sys.stdout = checked_output(previous)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError as error:
        # Into /dev/null goes all that is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()
        if error.cause is not None and not isinstance(error.cause, BrokenPipeError):
            report(f"{error.cause.strerror}; free space, or redirect it elsewhere")
        raise
    finally:
        sys.stdout = previous


def checked_output(stream: TextIO) -> TextIO:
    """Stream to another stream's descriptor, with `RawOutput` and spellings in ASCII.

    A stream without a descriptor, as tests have, is returned unchanged.
    """
    try:
        descriptor = stream.fileno()
        stream.flush()
    except io.UnsupportedOperation:
        return stream
    codecs.register_error("weft.ascii", as_ascii)
    return io.TextIOWrapper(
        io.BufferedWriter(RawOutput(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors="weft.ascii",
        line_buffering=stream.isatty(),
    )


def report(problem: str) -> None:
    """Print a standard output error, if there is a standard error."""
    if sys.stderr is not None:
        print(f"weft: standard output: {problem}", file=sys.stderr)


def as_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replacements for characters outside an encoding: from `ASCII`, and `?` for others."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(ASCII)
    return "".join(each if each.isascii() else "?" for each in text), error.end
