"""Maker of the tables in docs/fused.md, from results/gpu_fused.jsonl and of models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_collectives_page import where
from speed_page import NOT_MEASURED, markdown, number

if TYPE_CHECKING:
    from collections.abc import Iterable

RESULTS = Path(__file__).parent / "results" / "gpu_fused.jsonl"
MODELS = Path(__file__).parent / "results" / "gpu_fused_models.jsonl"
#: Kinds of cases, by table.
KINDS = {
    "embedding": ("embedding",),
    "gemv": ("gemv", "gemv_norm"),
    "norm": ("norm",),
    "gemm": ("gemm",),
}

Line = dict[str, Any]


def blocks(_page: str = "fused") -> dict[str, str]:
    """Tables by name."""
    last = latest(RESULTS)
    tables = {
        name: [line for line in last.values() if line["kind"] in kinds]
        for name, kinds in KINDS.items()
    }
    return {
        "where": where(last),
        "means": means(last.values()),
        "losses": losses(last.values()),
        "models": models(latest(MODELS)),
        **{name: times(lines) for name, lines in tables.items()},
    }


def latest(results: Path) -> dict[str, Line]:
    """The last record on GPUs with a time of the fused operator, by case and number of ranks."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    records = [json.loads(line) for line in lines]
    return {
        named(record): record
        for record in records
        if record["result"]
        and record["origin"]["device"] == "cuda"
        and record["result"]["fused"] is not None
        and record["result"]["sides"][record["result"]["fused"]]["status"] == "ok"
    }


def named(record: Line) -> str:
    """Case and number of GPUs."""
    return f"{record['case']}, {record['origin']['ranks']} GPUs"


def operator(record: Line) -> str:
    """Name of the operator in `weft.fused`, and number of GPUs."""
    return f"{record['workload']['operator']}, {record['origin']['ranks']} GPUs"


def times(lines: list[Line]) -> str:
    """Times by case: the fused operator, the others, the parts alone, and what is hidden."""
    rows = []
    for line in lines:
        result = line["result"]
        sides = result["sides"]
        best = result["best_unfused"]
        rows.append(
            [
                named(line),
                time(sides[result["fused"]]),
                time(sides.get(best)),
                best or "",
                ratio(result["speedup"]),
                ratio(result["speedup_nccl"]),
                microseconds(result["computation_us"]),
                ratio(result["other_computation"]),
                microseconds(result["exchange_us"]),
                microseconds(result["bound_us"]),
                "" if result["hidden"] is None else f"{100 * result['hidden']:.0f} %",
            ]
        )
    headers = ["case", "fused", "fastest unfused", "which", "/ fused", "own + NCCL / fused"]
    headers += ["computation", "other's / ours", "collective", "bound", "hidden"]
    return markdown(headers, rows)


def models(last: dict[str, Line]) -> str:
    """Times of steps of models, in ms: the fastest fused side, and the others."""
    rows = []
    for name, line in last.items():
        result = line["result"]
        sides, fused, best = result["sides"], result["fused"], result["best_peer"]
        rows.append(
            [
                name,
                fused,
                milliseconds(sides[fused], "p99"),
                best or "",
                milliseconds(sides.get(best), "p99"),
                ratio(1 / result["of_best_peer"] if result["of_best_peer"] else None),
                ", ".join(
                    f"{other} {milliseconds(side) or side['status']}"
                    for other, side in sides.items()
                    if other not in (fused, best)
                ),
                ", ".join(
                    f"{count} {operator}"
                    for operator, count in sides[fused]
                    .get("report", {})
                    .get("substitutions", {})
                    .items()
                ),
            ]
        )
    if not rows:
        return NOT_MEASURED
    headers = ["model", "fused", "ms", "fastest unfused", "ms", "/ fused", "others, ms"]
    return f"{where(last)}\n\n{markdown([*headers, 'substituted'], rows)}"


def milliseconds(side: Line | None, percentile: str = "") -> str:
    """Median of a side in ms, and p99 if wanted."""
    if side is None or side["status"] != "ok":
        return ""
    names = ["slowest_p50_us", *([f"slowest_{percentile}_us"] if percentile else [])]
    return " / ".join(number(side["time"][name] / 1000) for name in names)


def means(lines: Iterable[Line]) -> str:
    """Geometric means of ratios by operator, and numbers of cases that are slower."""
    by_operator: dict[str, list[Line]] = {}
    for line in lines:
        by_operator.setdefault(operator(line), []).append(line["result"])
    rows = [
        [
            name,
            str(len(results)),
            geometric(result["speedup"] for result in results),
            geometric(result["speedup_nccl"] for result in results),
            geometric(result["other_computation"] for result in results),
            str(sum(1 for result in results if (result["speedup"] or 1) < 1)),
        ]
        for name, results in by_operator.items()
    ]
    headers = ["operator", "cases", "fastest unfused / fused", "own + NCCL / fused"]
    headers += ["other's computation / ours", "slower cases"]
    return markdown(headers, rows)


def losses(lines: Iterable[Line]) -> str:
    """Cases in which an unfused side is faster, the worst first."""
    measured = list(lines)
    found = [line for line in measured if (line["result"]["speedup"] or 1) < 1]
    if not found:
        return "*None.*" if measured else NOT_MEASURED
    found.sort(key=lambda line: float(line["result"]["speedup"]))
    rows = [
        [named(line), line["result"]["best_unfused"], ratio(line["result"]["speedup"])]
        for line in found
    ]
    return markdown(["case", "faster side", "its time / fused"], rows)


def time(side: Line | None) -> str:
    """Median and p99 of a side in microseconds."""
    if side is None or side["status"] != "ok":
        return ""
    return f"{number(side['time']['slowest_p50_us'])} / {number(side['time']['slowest_p99_us'])}"


def microseconds(value: float | None) -> str:
    """A time, if there is one."""
    return "" if value is None else number(value)


def ratio(value: float | None) -> str:
    """A ratio, if there is one."""
    return "" if value is None else f"{value:.2f}"


def geometric(values: Iterable[float | None]) -> str:
    """Geometric mean of the values that are known."""
    logs = [math.log(value) for value in values if value]
    return f"{math.exp(sum(logs) / len(logs)):.2f}" if logs else ""
