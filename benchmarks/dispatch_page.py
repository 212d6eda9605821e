"""Makes docs/dispatch.md and docs/results/dispatch.md, from results/dispatch.jsonl."""

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
    "libfabric": "bare libfabric",
}

#: Query length in the headline.
HEADLINE_BYTES = 64

Line = dict[str, Any]


def blocks(_page: str = "dispatch") -> dict[str, str]:
    """Tables by name."""
    return {
        "headline": table(RESULTS, HEADLINE_BYTES),
        "dispatch": table(RESULTS),
        "connections": connections(RESULTS),
    }


def connections(results: Path) -> str:
    """Rates and round trips in the last successful run with each connection count."""
    last: dict[tuple[str, int, str], Line] = {}
    for line in outcomes(results):
        if line.get("connections", 1) > 1 and line["bytes"] == 64:
            last[line["path"], line["connections"], line["side"]] = line
    rows = [
        [
            f"{line['path']}, {SIDES[line['side']]}",
            f"{line['connections']:,}",
            f"{line['queries_per_s']:,.0f}",
            "" if line["weft_ratio"] is None else f"{line['weft_ratio']:.2f}",
            *(number(line[key]) for key in ("p50_us", "p99_us")),
        ]
        for _, line in sorted(last.items(), key=lambda item: (item[0][:2], item[0][2] != "weft"))
    ]
    headers = ["path, side", "connections", "queries/s", "Weft's rate / this", "p50 µs", "p99 µs"]
    return markdown(headers, rows)


def outcomes(results: Path) -> list[Line]:
    """Measurements from all successful runs, the latest last."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    records = [record for record in map(json.loads, lines) if record["exit"] == 0]
    return [line for record in records for line in record["outcomes"]]


def table(results: Path, count: int | None = None) -> str:
    """Rates and round trips in the last successful run over each path, for `count` bytes or all."""
    last: dict[tuple[str, int, str, bool], Line] = {}
    for line in outcomes(results):
        if line.get("connections", 1) == 1:
            last[line["path"], line["bytes"], line["side"], line.get("tls", False)] = line
    rows = [row(line) for line in last.values() if count in (None, line["bytes"])]
    headers = ["path, side", "bytes", "queries/s", "Weft's rate / this", "p50 µs", "p99 µs"]
    return markdown(headers, rows)


def row(line: Line) -> list[str]:
    """Cells for a measurement; empty where a side has none."""
    ratio = line["weft_ratio"]
    return [
        f"{line['path']}, {SIDES[line['side']]}" + (" with TLS" if line.get("tls") else ""),
        f"{line['bytes']:,}",
        "" if line["queries_per_s"] is None else f"{line['queries_per_s']:,.0f}",
        "" if ratio is None else f"{ratio:.2f}",
        *("" if line[key] is None else number(line[key]) for key in ("p50_us", "p99_us")),
    ]
