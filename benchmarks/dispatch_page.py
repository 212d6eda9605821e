"""Maker of the table in docs/dispatch.md, from results/dispatch.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speed_page import markdown, number

RESULTS = Path(__file__).parent / "results" / "dispatch.jsonl"
SIDES = {
    "weft": "Weft",
    "local": "copy within the process",
    "writes": "two counted writes",
    "socket": "bare socket",
}

Line = dict[str, Any]


def blocks(_page: str = "dispatch") -> dict[str, str]:
    """Table by name."""
    return {"dispatch": table(RESULTS)}


def table(results: Path) -> str:
    """Rates and round trips of the last successful run over each path."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    last: dict[str, list[Line]] = {}
    for record in map(json.loads, lines):
        if record["exit"] == 0:
            last[record["outcomes"][0]["path"]] = record["outcomes"]
    rows = [row(line) for outcomes in last.values() for line in outcomes]
    headers = ["path, side", "bytes", "queries/s", "Weft's rate / this", "p50 µs", "p99 µs"]
    return markdown(headers, rows)


def row(line: Line) -> list[str]:
    """Cells of a measurement; empty where a side has none."""
    ratio = line["weft_ratio"]
    return [
        f"{line['path']}, {SIDES[line['side']]}",
        f"{line['bytes']:,}",
        "" if line["queries_per_s"] is None else f"{line['queries_per_s']:,.0f}",
        "" if ratio is None else f"{ratio:.2f}",
        *("" if line[key] is None else number(line[key]) for key in ("p50_us", "p99_us")),
    ]
