"""Frame for lab programs: signals, errors and exit statuses."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Final

from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["UNAVAILABLE", "guarded"]

#: Exit status on a machine that lacks what the program needs.
UNAVAILABLE: Final = 69


def guarded(name: str, command: Callable[[], int]) -> int:
    """Run a command; returns its exit status, or its error's, which is printed behind the name.

    SIGTERM and SIGHUP end its blocks, which remove ranks, guests and files.
    """
    # The default action would end the process without that.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        return command()
    except LabError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def stop(number: int, _: object) -> None:
    """End the program; open blocks clean up."""
    raise SystemExit(128 + number)
