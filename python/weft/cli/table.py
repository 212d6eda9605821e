"""Tables and bars as text."""

from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["format_bars", "format_table"]

BAR_WIDTH: Final = 40


def format_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows under headers, in columns as wide as they need to be.

    A numeric column is right-aligned, with thousands grouped; None is an empty cell. A row has one
    value for each header, or `ValueError` is raised.
    """
    table = [list(row) for row in rows]
    for row in table:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} values under {len(headers)} headers: {row}")
    numeric = [
        any(is_number(row[column]) for row in table)
        and all(row[column] is None or is_number(row[column]) for row in table)
        for column in range(len(headers))
    ]
    lines = [list(headers), *([format_cell(value) for value in row] for row in table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def is_number(value: object) -> bool:
    """True for a value that is aligned to the right."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_cell(value: object) -> str:
    """One value as text: three significant digits for what is not whole."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float() if abs(value) >= 100:
            return f"{value:,.0f}"
        case float():
            return f"{value:.3g}"
        case _:
            return str(value)


def format_bars(values: Iterable[tuple[str, int]]) -> str:
    """Format labelled counts as horizontal bars, the largest `BAR_WIDTH` wide."""
    listed = list(values)
    largest = max((value for _, value in listed), default=0) or 1
    label_width = max((len(label) for label, _ in listed), default=0)
    number_width = max((len(f"{value:,}") for _, value in listed), default=0)
    return "\n".join(
        f"  {label:{label_width}}  {value:{number_width},}  {bar(value / largest)}".rstrip()
        for label, value in listed
    )


def bar(share: float) -> str:
    """Bar for a share of the full width, to an eighth of a character."""
    whole, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
    return "█" * whole + ("▏▎▍▌▋▊▉"[eighths - 1] if eighths else "")
