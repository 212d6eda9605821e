"""Reproduction command line: `python -m reproductions.NAME [--quick] [--out DIR] [--json]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from reproductions.report import markdown, write_results
from weft.cli.arguments import natural
from weft.cli.table import format_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from matplotlib.figure import Figure

    from reproductions.report import Table

__all__ = ["Reproduction", "document", "run"]


class Reproduction(Protocol):
    """Interface that a reproduction's package has."""

    #: Base name for the result files, the page and the pictures.
    NAME: str
    #: Title above its tables as a document.
    TITLE: str

    def reproduce(self, *, seed: int, quick: bool, progress: bool) -> dict[str, Any]:
        """Run the scenarios; the results as JSON values."""

    def tables(self, found: dict[str, Any]) -> Iterable[Table]:
        """Result tables."""

    def notes(self, found: dict[str, Any]) -> Sequence[str]:
        """Sentences below the tables."""

    def pictures(self, found: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
        """Result pictures, with file names."""


def run(reproduction: Reproduction, arguments: Sequence[str] | None = None) -> int:
    """Run a reproduction with `arguments`, by default the process's own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m reproductions.{reproduction.NAME.replace('-', '_')}",
        description=reproduction.TITLE,
    )
    parser.add_argument(
        "--seed", type=natural, default=1, metavar="S", help="random seed (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs, some seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for tables, JSON and pictures"
    )
    parsed = parser.parse_args(arguments)
    if parsed.out is not None:
        prepare(parser, parsed.out)
    found = reproduction.reproduce(seed=parsed.seed, quick=parsed.quick, progress=not parsed.json)
    if parsed.out is not None:
        save(reproduction, parsed.out, found)
    if parsed.json:
        print(json.dumps(found))
    else:
        show(reproduction, found)
        if parsed.out is not None:
            print(f"\nTables, JSON and pictures  {parsed.out}")
    return 0


def prepare(parser: argparse.ArgumentParser, out: Path) -> None:
    """Create the directory and check that pictures can be drawn, before any simulation runs."""
    from weft.report.figure import check_target

    try:
        out.mkdir(parents=True, exist_ok=True)
        check_target(out / "picture.svg")
    except (OSError, ValueError) as error:
        parser.error(f"--out {out}: {error}")


def save(reproduction: Reproduction, out: Path, found: dict[str, Any]) -> None:
    """Write tables, results and pictures."""
    from weft.report.figure import save as save_figure

    write_results(out, reproduction.NAME, document(reproduction, found), found)
    for name, figure in reproduction.pictures(found):
        save_figure(figure, out / name)


def show(reproduction: Reproduction, found: dict[str, Any]) -> None:
    """Print the tables and notes."""
    for title, headers, rows in reproduction.tables(found):
        print(f"{title}\n\n{format_table(headers, rows)}\n")
    for note in reproduction.notes(found):
        print(note)


def document(reproduction: Reproduction, found: dict[str, Any]) -> str:
    """Tables and notes as a Markdown document."""
    parts = [f"# {reproduction.TITLE}\n"]
    for title, headers, rows in reproduction.tables(found):
        parts.append(f"\n## {title}\n\n{markdown(headers, rows)}")
    return "\n".join([*parts, "", *reproduction.notes(found)]) + "\n"
