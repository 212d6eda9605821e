"""Maker of the tables in docs/gpu-collectives.md, from results/gpu_collectives.jsonl.

Columns of an earlier day on a machine of the same kind are from `reference/gpu_collectives.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speed_page import NOT_MEASURED, markdown, number, size

RESULTS = Path(__file__).parent / "results" / "gpu_collectives.jsonl"
REFERENCE = Path(__file__).parent / "reference" / "gpu_collectives.json"
#: Sides in the order of columns, with their headers.
SIDES = {
    "weft": "Weft",
    "nccl": "NCCL",
    "nccl windows": "NCCL, windows",
    "torch one_shot": "torch one-shot",
    "torch two_shot": "torch two-shot",
}

Line = dict[str, Any]


def blocks(_page: str = "gpu-collectives") -> dict[str, str]:
    """Tables by name."""
    last = latest(RESULTS)
    return {"where": where(last), "times": times(last), "sms": sms(last)}


def latest(results: Path) -> dict[str, Line]:
    """The last successful record of each case on GPUs."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    records = [json.loads(line) for line in lines]
    return {
        record["case"]: record
        for record in records
        if record["status"] == "ok" and record["origin"]["device"] == "cuda"
    }


def where(last: dict[str, Line]) -> str:
    """Machines, commits and versions of the records."""
    found = {}
    for record in last.values():
        origin = record["origin"]
        gpus = origin["gpus"]
        versions = ", ".join(f"{name} {value}" for name, value in origin["versions"].items())
        text = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
        text += f"; commit {origin['commit']}, {origin['at'][:10]}; {versions}"
        found[text] = None
    return "\n".join(found) or NOT_MEASURED


def times(last: dict[str, Line]) -> str:
    """Median time of a call at the slowest rank, by case and side."""
    rows = []
    for case, record in last.items():
        if record["kind"] != "collective":
            continue
        sides = record["result"]["sides"]
        cells = [time(sides.get(side)) for side in SIDES]
        peers = [
            value["time"]["slowest_p50_us"]
            for side, value in sides.items()
            if not side.startswith("weft") and value["status"] == "ok"
        ]
        own = sides.get("weft")
        ratio = ""
        if peers and own is not None and own["status"] == "ok":
            ratio = f"{min(peers) / own['time']['slowest_p50_us']:.2f}"
        rows.append([case.replace("_", "-"), *cells, ratio])
    return markdown(["case", *SIDES.values(), "best peer / Weft"], rows)


def time(side: Line | None) -> str:
    """Median and p99 of a side in microseconds."""
    if side is None or side["status"] != "ok":
        return ""
    return f"{number(side['time']['slowest_p50_us'])} / {number(side['time']['slowest_p99_us'])}"


def sms(last: dict[str, Line]) -> str:
    """Times of calls by chunks, by number of multiprocessors, beside NCCL's of another day."""
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    nccl = {
        (operation, count): us
        for operation, times in reference["nccl_us"].items()
        for count, us in zip(reference["bytes"], times, strict=True)
    }
    rows, headers = [], []
    for record in last.values():
        if record["kind"] != "sms":
            continue
        workload, points = record["workload"], record["result"]["us"]
        operation, count = workload["operation"], workload["bytes"]
        case = f"{operation.replace('_', '-')} {size(count)}"
        rows.append([case, *map(number, points.values()), number(nccl[operation, count])])
        headers = ["case", *points, "NCCL, 2026-11-22"]
    return markdown(headers, rows)
