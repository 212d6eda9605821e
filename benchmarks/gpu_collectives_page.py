"""Makes docs/gpu-collectives.md and docs/results/gpu-collectives.md.

Sources are results/gpu_collectives.jsonl and results/gpu_training.jsonl.

Columns from an earlier day on the same kind of machine are from `reference/gpu_collectives.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speed_page import NOT_MEASURED, markdown, number, size

RESULTS = Path(__file__).parent / "results" / "gpu_collectives.jsonl"
TRAINING = Path(__file__).parent / "results" / "gpu_training.jsonl"
REFERENCE = Path(__file__).parent / "reference" / "gpu_collectives.json"
#: Sides in column order, with headers.
SIDES = {
    "weft": "Weft",
    "weft symmetric": "Weft, symmetric",
    "weft copy engines": "Weft, copy engines",
    "nccl": "NCCL",
    "nccl windows": "NCCL, windows",
    "torch one_shot": "torch one-shot",
    "torch two_shot": "torch two-shot",
}

#: First words in headline case names.
HEADLINE = "all_reduce "
#: Side that earlier records do not have.
LATER = "weft copy engines"
#: Case kinds that are shown.
KINDS = ("collective", "sweep")
#: Weft's own choices, by memory kind.
OWN = ("weft", "weft symmetric")
#: Memory kinds in a sweep, with the first words in side names.
SWEPT = {"ordinary": "weft", "symmetric": "weft symmetric"}

Line = dict[str, Any]


def blocks(_page: str = "gpu-collectives") -> dict[str, str]:
    """Tables by name."""
    two, four = latest(RESULTS, 2), latest(RESULTS, 4)
    steps = latest_steps(TRAINING)
    reductions = {case: line for case, line in four.items() if case.startswith(HEADLINE)}
    return {
        "headline": times(reductions),
        "where": where(two),
        "times": times(two),
        "sms": sms(two),
        "where-4": where(four),
        "times-4": times(four),
        "sms-4": sms(four, beside=False),
        "steps-where": where(steps),
        "steps": step_times(steps),
    }


def latest(results: Path, ranks: int) -> dict[str, Line]:
    """Last successful GPU record for each shown case, with `ranks` ranks."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    records = [json.loads(line) for line in lines]
    return {
        record["case"]: record
        for record in records
        if record["kind"] in KINDS
        and record["status"] == "ok"
        and record["origin"]["device"] == "cuda"
        and record["origin"]["ranks"] == ranks
    }


def latest_steps(results: Path) -> dict[str, Line]:
    """Last successful GPU record for each training case and rank count."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    records = [json.loads(line) for line in lines]
    return {
        f"{record['case']}, {record['origin']['ranks']} GPUs": record
        for record in records
        if record["status"] == "ok" and record["origin"]["device"] == "cuda"
    }


def where(last: dict[str, Line]) -> str:
    """Machines, commits and versions in the records."""
    found: dict[str, None] = {}
    for record in last.values():
        origin = record["origin"]
        gpus = origin["gpus"]
        versions = ", ".join(f"{name} {value}" for name, value in origin["versions"].items())
        text = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
        text += f"; commit {origin['commit']}, {origin['at'][:10]}; {versions}"
        found[text] = None
    return "\n".join(found) or NOT_MEASURED


def times(last: dict[str, Line]) -> str:
    """Median call time at the slowest rank, by case and side."""
    rows = []
    measured = [record["result"]["sides"] for record in last.values()]
    shown = [side for side in SIDES if side != LATER or any(side in sides for sides in measured)]
    for case, record in last.items():
        if record["kind"] != "collective":
            continue
        sides = record["result"]["sides"]
        cells = [time(sides.get(side)) for side in shown]
        medians = {
            side: value["time"]["slowest_p50_us"]
            for side, value in sides.items()
            if value["status"] == "ok"
        }
        peers = [us for side, us in medians.items() if not side.startswith("weft")]
        own = [medians[side] for side in OWN if side in medians]
        ratio = f"{min(peers) / min(own):.2f}" if peers and own else ""
        rows.append([case.replace("_", "-"), *cells, ratio])
    return markdown(["case", *(SIDES[side] for side in shown), "best peer / Weft"], rows)


def time(side: Line | None) -> str:
    """A side's median and p99 in microseconds."""
    if side is None or side["status"] != "ok":
        return ""
    return f"{number(side['time']['slowest_p50_us'])} / {number(side['time']['slowest_p99_us'])}"


def step_times(last: dict[str, Line]) -> str:
    """Milliseconds per step at the slowest rank, by case and side."""
    shown = ("weft", "weft symmetric", "nccl", "torch one_shot")
    rows = []
    for case, record in last.items():
        sides = record["result"]["sides"]
        ms = {
            name: [sides[name]["time"][key] / 1000 for key in ("slowest_p50_us", "slowest_p99_us")]
            for name in shown
            if name in sides and sides[name]["status"] == "ok"
        }
        cells = [" / ".join(map(number, ms.get(name, ()))) for name in shown]
        peers = [values[0] for name, values in ms.items() if name not in OWN]
        own = [values[0] for name, values in ms.items() if name in OWN]
        rows.append([case, *cells, f"{min(peers) / min(own):.3f}" if peers and own else ""])
    return markdown(["case", *(SIDES[name] for name in shown), "best peer / Weft"], rows)


def sms(last: dict[str, Line], *, beside: bool = True) -> str:
    """Times by SM count and memory kind, `beside` NCCL's from another day."""
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    nccl = {
        (operation, count): number(us)
        for operation, times in reference["nccl_us"].items()
        for count, us in zip(reference["bytes"], times, strict=True)
    }
    swept = [record for record in last.values() if record["kind"] == "sweep"]
    points = sorted({count for record in swept for count in record["workload"]["num_sms"]})
    rows = []
    for record in swept:
        operation, count = record["workload"]["operation"], record["workload"]["bytes"]
        case = f"{operation.replace('_', '-')} {size(count)}"
        for memory, prefix in SWEPT.items():
            sides = [record["result"]["sides"].get(f"{prefix} {point} SMs") for point in points]
            cells = [median(side) for side in sides]
            rows.append([case, memory, *cells, *([nccl.get((operation, count), "")] * beside)])
    return markdown(["case", "memory", *map(str, points), *["NCCL, 2026-11-22"] * beside], rows)


def median(side: Line | None) -> str:
    """A side's median in microseconds."""
    if side is None or side["status"] != "ok":
        return ""
    return number(side["time"]["slowest_p50_us"])
