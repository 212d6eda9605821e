"""Native log records for Python's `logging`: the logger `weft` and children below it.

A record from the Rust module `weft_fabric::engine` goes to the logger `weft.fabric.engine`.
`WEFT_LOG` chooses the records that the native module passes on, `warn` by default; levels and
handlers in Python's loggers decide further. With `WEFT_LOG` set, records are printed on standard
error for as long as the program has configured no handler. See
https://docs.python.org/3/howto/logging.html.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import TYPE_CHECKING, Final, TypeAlias

from weft import _native

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["deliver"]

#: Target, `logging` level number, message, file, line.
Record: TypeAlias = tuple[str, int, str, str, int]

LOGGER: Final = logging.getLogger("weft")
FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RequestedOutput(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error, for records that `WEFT_LOG` requests, while there is no other handler."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        if len(LOGGER.handlers) == 1 and not logging.getLogger().handlers:
            self.setStream(sys.stderr)
            super().emit(record)


def deliver(records: Iterable[Record]) -> None:
    """Hand native module records to Python loggers."""
    for target, level, message, file, line in records:
        logger = logging.getLogger(logger_name(target))
        if logger.isEnabledFor(level):
            logger.handle(logger.makeRecord(logger.name, level, file, line, message, (), None))


def logger_name(target: str) -> str:
    """Logger for a Rust module: `weft_fabric::engine` is `weft.fabric.engine`.

    Other targets are below `weft`: `tuner` is `weft.tuner`.
    """
    if not target.startswith("weft_"):
        return f"weft.{target}"
    return target.replace("::", ".").replace("_", ".", 1)


def request_output() -> None:
    """Let through and print everything that `WEFT_LOG` requests."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(1)
    handler = RequestedOutput()
    handler.setFormatter(logging.Formatter(FORMAT))
    LOGGER.addHandler(handler)


if os.environ.get("WEFT_LOG", "").strip():
    request_output()
atexit.register(_native.end_logging)
