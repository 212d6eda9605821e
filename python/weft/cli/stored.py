"""Results in files: what cannot be stored is an error after the result is shown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.output_files import why

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Storing", "file_name"]


def file_name(text: str) -> Path:
    """Name for a file to write."""
    if not text or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected the name of a file")
    return Path(text)


class Storing:
    """Files for one command's result.

    Args:
        command: the command, as its errors name it.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.errors: list[str] = []

    def attempt(self, option: str, path: Path, write: Callable[[], object]) -> bool:
        """Call `write`; false if it raised an operating system error, which is kept."""
        try:
            write()
        except OSError as error:
            self.errors.append(f"{option} {path}: {why(error)}; the result is complete without it")
            return False
        return True

    def status(self, status: int = 0) -> int:
        """Print the errors; returns the command's exit status, at least 1 with errors."""
        for error in self.errors:
            print(f"{self.command}: {error}", file=sys.stderr)
        return max(status, 1) if self.errors else status
