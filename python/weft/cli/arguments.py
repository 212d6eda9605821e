"""Argument types and names shared by the subcommands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final, TypeAlias

from weft import _native
from weft.launch.limits import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MOST",
    "MOST_BYTES",
    "MOST_RANKS",
    "PROVIDERS",
    "Subparsers",
    "byte_count",
    "natural",
    "positive",
    "ranks",
    "up_to",
]

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

#: Names of the providers that a process group can use.
PROVIDERS: Final = tuple(name for *_, names in _native.providers() for name in names)

#: The largest whole number that the native module takes.
MOST: Final = 2**64 - 1
#: Largest count, for example rounds, tokens, samples or switches.
MOST_COUNT: Final = 2**31 - 1
#: Largest number of bytes.
MOST_BYTES: Final = 1 << 50


def up_to(most: int) -> Callable[[str], int]:
    """Argument type for whole numbers from 1 to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number") from None
        if value < 1:
            raise argparse.ArgumentTypeError(f"{value}: expected at least 1")
        if value > most:
            raise argparse.ArgumentTypeError(f"{value}: expected at most {most}")
        return value

    return parse


#: Rank count.
ranks: Final = up_to(MOST_RANKS)
#: Count of at least 1.
positive: Final = up_to(MOST_COUNT)
#: Byte count, at least 1.
byte_count: Final = up_to(MOST_BYTES)


def natural(text: str) -> int:
    """Whole number, at least 0, in 64 bits."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 on")
    if int(text) > MOST:
        raise argparse.ArgumentTypeError(f"{text}: expected at most {MOST}")
    return int(text)
