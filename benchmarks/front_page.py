"""Makes the README.md table and picture: decode and all-reduce on two GPUs.

Weft, NCCL and torch are measured in one run (results/gpu_moe.jsonl, results/gpu_collectives.jsonl).
DeepEP was measured on the same kind of machine on another day (reference/gpu_moe.json).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_collectives_page
import gpu_page
from speed_page import markdown, number, size

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "front.svg"
GPUS = 2
#: All-reduce sides by name in the picture; each name shows the best side.
SIDES = {
    "Weft": ("weft",),
    "Weft, symmetric memory": ("weft symmetric",),
    "NCCL": ("nccl", "nccl windows"),
    "torch, symmetric memory": ("torch one_shot", "torch two_shot"),
}
#: All-reduce sizes in the table, in bytes.
SHOWN = (8 << 10, 64 << 10, 1 << 20, 8 << 20)


def blocks(_page: str = "front") -> dict[str, str]:
    """The README.md block."""
    weft, deepep = decode()
    rows = [["MoE decode: dispatch and combine", number(weft), "", "", "", number(deepep)]]
    for length, sides in all_reduces().items():
        if length in SHOWN:
            times = [number(sides[name]) if name in sides else "" for name in SIDES]
            rows.append([f"all-reduce, {size(length)}, bfloat16", *times, ""])
    headers = [f"µs, median, {GPUS} H200", *SIDES, "DeepEP V1"]
    return {"front": markdown(headers, rows)}


def draw(_page: str = "front") -> list[Path]:
    """Draw the picture; returns the path."""
    from weft.report.figure import COLOURS, lines, new_figure, save

    weft, deepep = decode()
    figure, (left, right) = new_figure(2, 5.0, 3.6)
    left.bar(["Weft", "DeepEP V1"], [weft, deepep], color=COLOURS[:2], width=0.6)
    left.set_title(f"MoE decode, 128 tokens a rank, {GPUS} H200", fontsize=10)
    left.set_ylabel("dispatch and combine, µs")
    found = all_reduces()
    series = {
        name: [(length, sides[name]) for length, sides in found.items() if name in sides]
        for name in SIDES
    }
    title = f"all-reduce, bfloat16, {GPUS} H200"
    lines(right, series, title=title, x="bytes", y="median, µs", sizes=True)
    save(figure, PICTURE)
    return [PICTURE]


def decode() -> tuple[float, float]:
    """Microseconds per decode round in a CUDA graph: Weft's, DeepEP's."""
    good = [
        record
        for record in gpu_page.good(gpu_page.read(gpu_page.RESULTS))
        if record["case"] == "decode" and gpu_page.machine(record).startswith(f"{GPUS} ")
    ]
    weft: float = good[-1]["result"]["times"]["round"]["slowest_p50_us"]
    measured = gpu_page.reference()["measured_two"]["deepep_v1"]["decode"]
    return weft, measured["pair_in_graph_us"]


def all_reduces() -> dict[int, dict[str, float]]:
    """Median microseconds by bytes and by name in `SIDES`."""
    last = gpu_collectives_page.latest(gpu_collectives_page.RESULTS, GPUS)
    found: dict[int, dict[str, float]] = {}
    for record in last.values():
        workload = record["workload"]
        if workload["kind"] != "collective" or workload["operation"] != "all_reduce":
            continue
        sides = record["result"]["sides"]
        medians = {name: best(sides, of) for name, of in SIDES.items()}
        found[workload["bytes"]] = {
            name: median for name, median in medians.items() if median is not None
        }
    return dict(sorted(found.items()))


def best(sides: dict[str, Any], names: tuple[str, ...]) -> float | None:
    """Smallest median among the sides that ran; None if none did."""
    ran = [sides[name] for name in names if sides.get(name, {}).get("status") == "ok"]
    return min((side["time"]["slowest_p50_us"] for side in ran), default=None)
