"""Cases: what is run, and how the command line selects it."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Case", "indivisible", "named", "options", "parse"]


@dataclass(frozen=True)
class Case:
    """A workload that all sides run in turn; subclasses add `seconds` and `limit`, among others."""

    name: str
    kind: str

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**fields)


AnyCase = TypeVar("AnyCase", bound=Case)


def named(names: str, cases: Sequence[AnyCase]) -> list[AnyCase]:
    """Cases by full names or first words, with commas.

    Raises:
        ValueError: if a name matches no case.
    """
    chosen: dict[str, AnyCase] = {}
    for name in (word.strip() for word in names.split(",")):
        found = [case for case in cases if f"{case.name} ".startswith(f"{name} ")]
        if not found:
            known = ", ".join(dict.fromkeys(case.name.split(" ")[0] for case in cases))
            raise ValueError(f"--cases {name!r}: no such case; expected {known}, or a full name")
        chosen |= {case.name: case for case in found}
    return list(chosen.values())


def indivisible(shape: dict[str, Any], ranks: int, multiples: dict[str, int]) -> str | None:
    """Reason why ranks cannot divide a shape; None if all sizes are the given multiples."""
    for name, multiple in multiples.items():
        if shape[name] % multiple:
            return f"{ranks} ranks: expected {name} {shape[name]} as a multiple of {multiple}"
    return None


def options(description: str, results: Path, cases: str) -> argparse.ArgumentParser:
    """Parser with every benchmark's options: device, ranks, budget, results, JSON, cases.

    Args:
        description: program docstring.
        results: default record file.
        cases: help for `--cases`.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--device", choices=("cuda", "twin"), default="cuda", help="device (default %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, help="number of ranks (default: one for each visible GPU)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=1e6,
        metavar="SECONDS",
        help="time limit: cases that exceed it are skipped",
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help=f"JSON-lines file (default {results.name})"
    )
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.add_argument("--cases", metavar="NAME,...", help=cases)
    return parser


def parse(
    parser: argparse.ArgumentParser,
    choose: Callable[[argparse.Namespace], Sequence[Any]],
    shrink: Callable[[list[Any]], list[Any]],
) -> argparse.Namespace:
    """The options, with the cases as `chosen`.

    Args:
        parser: from `options`.
        choose: cases that the options name; it raises ValueError if there is no such case.
        shrink: replaces cases by small ones, for the twin.
    """
    arguments = parser.parse_args()
    if arguments.ranks is not None and arguments.ranks < 1:
        parser.error(f"--ranks {arguments.ranks}: expected 1 or more")
    for name in ("seconds", "budget"):
        if not getattr(arguments, name, 1.0) > 0:
            parser.error(f"--{name} {getattr(arguments, name)}: expected more than 0")
    try:
        arguments.chosen = list(choose(arguments))
        if arguments.device == "twin" or getattr(arguments, "tiny", False):
            arguments.chosen = shrink(arguments.chosen)
    except ValueError as error:
        parser.error(str(error))
    return arguments
