"""Checks on the published tables: sources, ranks and times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SYSTEMS", "check"]

#: Columns for an operation: system and network.
SYSTEMS: Final = ("pplx_cx7", "pplx_efa", "deepep_cx7")


def check(
    published: dict[str, Any], tables: Sequence[str], operations: Sequence[str]
) -> dict[str, Any]:
    """The published figures, if these tables are valid.

    Raises:
        ValueError: for a table without workload or source, a rank count that is no positive integer
        or comes twice, an unknown column, or a time that is not positive.
    """
    for name in tables:
        table = published.get(name)
        if not isinstance(table, dict):
            raise ValueError(f"{name}: missing from the published tables")
        for label in ("workload", "source"):
            if not isinstance(table.get(label), str) or not table[label]:
                raise ValueError(f"{name}, {label} {table.get(label)!r}: expected a text")
        seen: set[int] = set()
        for number, row in enumerate(table.get("rows", ()), 1):
            where = f"{name}, row {number}"
            ep = row.get("ep")
            if type(ep) is not int or ep < 1 or ep in seen:
                raise ValueError(f"{where}: ep {ep!r}: expected a new number of ranks")
            seen.add(ep)
            for operation in operations:
                check_times(f"{where}: {operation}", row.get(operation))
        if not seen:
            raise ValueError(f"{name}, rows: expected at least one")
    return published


def check_times(where: str, times: Any) -> None:
    """Reject times that are not positive microseconds in known systems."""
    if not isinstance(times, dict) or not times:
        raise ValueError(f"{where} {times!r}: expected times of {', '.join(SYSTEMS)}")
    for system, time in times.items():
        if system not in SYSTEMS:
            raise ValueError(f"{where}: column {system!r}: expected one of {', '.join(SYSTEMS)}")
        # Also false for NaN; a time above a second is in the wrong unit.
        if isinstance(time, bool) or not isinstance(time, int | float) or not 0 < time < 1e6:
            raise ValueError(f"{where} {system} {time!r}: expected microseconds, 0 to 1e6")
