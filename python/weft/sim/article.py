"""What the commands that reproduce publications share: published data, deviations, files."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["Table", "deviation", "finish", "markdown", "percent", "published"]

#: A title, headers, and rows.
Table = tuple[str, "Sequence[str]", "Sequence[Sequence[object]]"]


def published(name: str) -> dict[str, Any]:
    """Published figures with their source, as the package carries them."""
    text = resources.files("weft.sim").joinpath("published.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)[name]
    return found


def deviation(simulated: float, known: float | None) -> float | None:
    """By how much a simulated figure is off, as a share of the published one."""
    return None if known is None else simulated / known - 1.0


def percent(share: float | None) -> str | None:
    """A share for people, with its sign."""
    return None if share is None else f"{share:+.1%}"


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers are on the right."""
    listed = [list(row) for row in rows]
    numeric = [
        all(cell is None or is_figure(row[column]) for row in listed for cell in [row[column]])
        for column in range(len(headers))
    ]
    rule = ["---:" if right else "---" for right in numeric]
    lines = [list(headers), rule, *([show(cell) for cell in row] for row in listed)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def is_figure(cell: object) -> bool:
    """Whether a cell is a number, or a number as text."""
    if isinstance(cell, int | float):
        return True
    return isinstance(cell, str) and cell[:1] in "+-0123456789" and cell[-1:] in "%0123456789"


def show(cell: object) -> str:
    """A cell as text."""
    match cell:
        case None:
            return ""
        case float():
            return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
        case int():
            return f"{cell:,}"
        case _:
            return str(cell)


def finish(out: Path, name: str, document: str, found: dict[str, Any]) -> None:
    """Keep the tables and the figures behind them."""
    out.joinpath(f"{name}.md").write_text(document, encoding="utf-8")
    text = json.dumps(found, indent=1) + "\n"
    out.joinpath(f"{name}.json").write_text(text, encoding="utf-8")
