"""Argument types and names shared by the subcommands."""

from __future__ import annotations

import argparse
from typing import Final, TypeAlias

from weft import _native

__all__ = ["MOST", "PROVIDERS", "Subparsers", "natural", "positive"]

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

#: The names of providers that a group of processes can use.
PROVIDERS: Final = tuple(name for *_, names in _native.providers() for name in names)

#: The largest whole number that the native module takes.
MOST: Final = 2**64 - 1


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: expected at least 1")
    return value


def natural(text: str) -> int:
    """A whole number of at least 0, and of 64 bits."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 on")
    if int(text) > MOST:
        raise argparse.ArgumentTypeError(f"{text}: expected at most {MOST}")
    return int(text)
