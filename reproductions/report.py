"""Parts that all reproductions share: data files, deviations, Markdown tables, result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Table", "deviation", "markdown", "percent", "read", "write_results"]

#: Title, headers and rows.
Table = tuple[str, "Sequence[str]", "Sequence[Sequence[object]]"]


def read(*path: str) -> Any:
    """JSON data file, by its path below `reproductions/`."""
    return json.loads(Path(__file__).parent.joinpath(*path).read_text(encoding="utf-8"))


def deviation(simulated: float, published: float | None) -> float | None:
    """A simulated figure's relative deviation from the published one."""
    return None if published is None else simulated / published - 1.0


def percent(share: float | None) -> str | None:
    """Share as a signed percentage, as text."""
    return None if share is None else f"{share:+.1%}"


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown table; numeric columns are right-aligned."""
    listed = [list(row) for row in rows]
    numeric = [
        all(cell is None or is_figure(row[column]) for row in listed for cell in [row[column]])
        for column in range(len(headers))
    ]
    rule = ["---:" if right else "---" for right in numeric]
    lines = [list(headers), rule, *([show(cell) for cell in row] for row in listed)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def is_figure(cell: object) -> bool:
    """True for a number, or a number as text."""
    if isinstance(cell, int | float):
        return True
    return isinstance(cell, str) and cell[:1] in "+-0123456789" and cell[-1:] in "%0123456789"


def show(cell: object) -> str:
    """Cell as text, with four significant digits."""
    match cell:
        case None:
            return ""
        case float():
            return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
        case int():
            return f"{cell:,}"
        case _:
            return str(cell)


def write_results(out: Path, name: str, document: str, found: dict[str, Any]) -> None:
    """Write the tables as `NAME.md` and the results as `NAME.json`."""
    out.joinpath(f"{name}.md").write_text(document, encoding="utf-8")
    text = json.dumps(found, indent=1) + "\n"
    out.joinpath(f"{name}.json").write_text(text, encoding="utf-8")
