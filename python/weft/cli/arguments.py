"""What the subcommands' argument parsers share."""

from __future__ import annotations

import argparse
from typing import Final, TypeAlias

__all__ = ["PROVIDERS", "Subparsers", "positive"]

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

PROVIDERS: Final = ("shm", "tcp")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}, and must be at least 1")
    return value
