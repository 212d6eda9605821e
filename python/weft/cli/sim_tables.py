"""Outcomes for `weft sim`: JSON and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from weft.base.units import format_bytes, format_seconds
from weft.cli.table import format_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weft.sim.sweep import Point

__all__ = ["as_json", "print_tables"]

#: Result columns by scenario: header, and the value's path in `results`.
COLUMNS: Final[Mapping[str, Sequence[tuple[str, tuple[str, ...]]]]] = {
    "collective": (("Gb/s", ("algorithm_bandwidth_gbps",)),),
    "moe": (
        ("dispatch p50", ("dispatch", "p50_s")),
        ("dispatch p99", ("dispatch", "p99_s")),
        ("combine p50", ("combine", "p50_s")),
        ("combine p99", ("combine", "p99_s")),
    ),
    "dlrm": (("unfused", ("unfused_s",)), ("fused", ("fused_s",)), ("gain", ("gain",))),
    "query": (
        ("p50", ("latency", "p50_s")),
        ("p99", ("latency", "p99_s")),
        ("queries/s", ("throughput_per_s",)),
        ("lost", ("throughput_loss",)),
    ),
}


def as_json(
    scenario: str, grid: Sequence[Point], outcomes: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """One outcome with the scenario; for a sweep, the totals and all points."""
    if len(outcomes) == 1:
        return {"scenario": scenario, "spec": grid[0].spec} | outcomes[0]
    return {
        "scenario": scenario,
        "time_s": sum(outcome["time_s"] for outcome in outcomes),
        "max_link_load": max(outcome["max_link_load"] for outcome in outcomes),
        "cpu_s": sum(outcome["cpu_s"] for outcome in outcomes),
        "constants": outcomes[0]["constants"],
        "points": [
            {"spec": point.spec} | outcome for point, outcome in zip(grid, outcomes, strict=True)
        ],
    }


def print_tables(scenario: str, outcomes: Sequence[dict[str, Any]]) -> None:
    """Print the outcomes as tables."""
    rows = [row(scenario, outcome) for outcome in outcomes]
    axes = [*outcomes[0]["at"]]
    headers = [*axes, "time", "most flows on a link"]
    headers += [header for header, _ in COLUMNS.get(scenario, ())]
    print(format_table(headers, rows))
    if len(outcomes) > 1:
        return
    (outcome,) = outcomes
    constants = [
        (name, value) for name, value in outcome["constants"].items() if value not in (0, None)
    ]
    print("\n" + format_table(("constant", "value"), constants))
    if outcome["links"]:
        links = [
            (
                f"{link['from']} to {link['to']}",
                format_bytes(link["bytes"]),
                f"{link['utilisation']:.1%}",
                link["max_load"],
            )
            for link in outcome["links"]
        ]
        print("\nBusiest links\n" + format_table(("link", "bytes", "used", "most flows"), links))
    print(f"\n{outcome['flows']:,} messages simulated in {outcome['cpu_s']:.3g} s of one core")


def row(scenario: str, outcome: Mapping[str, Any]) -> list[object]:
    """Row for one point: axes, time and results."""
    cells: list[object] = [
        format_bytes(value) if name == "bytes" else value for name, value in outcome["at"].items()
    ]
    cells += [format_seconds(outcome["time_s"]), outcome["max_link_load"]]
    for header, path in COLUMNS.get(scenario, ()):
        value: Any = outcome["results"]
        for name in path:
            value = value[name]
        if value is not None and path[-1].endswith("_s") and header != "queries/s":
            value = format_seconds(value)
        elif value is not None and header in ("gain", "lost"):
            value = f"{value:.1%}"
        cells.append(value)
    return cells
