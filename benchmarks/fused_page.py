"""Makes docs/fused.md and docs/results/fused.md: tables and a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_collectives_page import time, where
from speed_page import NOT_MEASURED, markdown, number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "fused-ablation.svg"
RESULTS = Path(__file__).parent / "results" / "gpu_fused.jsonl"
MODELS = Path(__file__).parent / "results" / "gpu_fused_models.jsonl"
#: Case kinds, by table.
KINDS = {
    "embedding": ("embedding",),
    "gemv": ("gemv", "gemv_norm"),
    "norm": ("norm",),
    "gemm": ("gemm",),
}

#: Kind for cases that run the fused operator with other tilings.
ABLATION = "ablation"
#: Kinds without other libraries.
VARIED = (ABLATION, "stores")
#: Kind for float8 GEMMs, which have no table yet.
SCALED = "scaled"
#: Panels side by side in the picture.
PANELS = 4

Line = dict[str, Any]


def blocks(_page: str = "fused") -> dict[str, str]:
    """Tables by name."""
    every = latest(RESULTS)
    apart = (*VARIED, SCALED)
    last = {name: line for name, line in every.items() if line["kind"] not in apart}
    tables = {
        name: [line for line in last.values() if line["kind"] in kinds]
        for name, kinds in KINDS.items()
    }
    return {
        "where": where(every),
        "means": means(last.values()),
        "losses": losses(last.values()),
        "models": models(latest(MODELS)),
        **{name: times(lines) for name, lines in tables.items()},
        ABLATION: ablation(ablations(every)),
    }


def draw(_page: str = "fused") -> list[Path]:
    """Draw the ablation picture if there are results; returns the drawn paths."""
    found = ablations(latest(RESULTS))
    if not found:
        return []
    draw_ablation(found, PICTURE)
    return [PICTURE]


def latest(results: Path) -> dict[str, Line]:
    """The last GPU record with a fused operator time, by case and rank count."""
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
    """Case and GPU count."""
    return f"{record['case']}, {record['origin']['ranks']} GPUs"


def operator(record: Line) -> str:
    """Operator name in `weft.fused`, and GPU count."""
    return f"{record['workload']['operator']}, {record['origin']['ranks']} GPUs"


def times(lines: list[Line]) -> str:
    """Times by case: the fused operator, the others, the separate parts, and what is hidden.

    The default call's ratio is the last column, if a record has it.
    """
    rows = []
    has_default = any(line["result"].get("speedup_default") for line in lines)
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
                *([ratio(result.get("speedup_default"))] if has_default else []),
            ]
        )
    headers = ["case", "fused", "fastest unfused", "which", "/ fused", "own + NCCL / fused"]
    headers += ["computation", "other's / ours", "collective", "bound", "hidden"]
    headers += ["/ default"] if has_default else []
    return markdown(headers, rows)


def models(last: dict[str, Line]) -> str:
    """Model step times, in ms: the fastest fused side, and the others."""
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
    """A side's median in ms, and p99 if wanted."""
    if side is None or side["status"] != "ok":
        return ""
    names = ["slowest_p50_us", *([f"slowest_{percentile}_us"] if percentile else [])]
    return " / ".join(number(side["time"][name] / 1000) for name in names)


def means(lines: Iterable[Line]) -> str:
    """Geometric mean ratios by operator, and how many cases are slower."""
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


def microseconds(value: float | None) -> str:
    """A time, if there is one."""
    return "" if value is None else number(value)


def ratio(value: float | None) -> str:
    """A ratio, if there is one."""
    return "" if value is None else f"{value:.2f}"


def geometric(values: Iterable[float | None]) -> str:
    """Geometric mean over the values that are known."""
    logs = [math.log(value) for value in values if value]
    return f"{math.exp(sum(logs) / len(logs)):.2f}" if logs else ""


def ablations(last: dict[str, Line]) -> list[Line]:
    """Records for the fused operator with other tilings."""
    return [line for line in last.values() if line["kind"] == ABLATION]


def ablation(lines: list[Line]) -> str:
    """Picture link, and times over the default's, by case and varied size."""
    if not lines:
        return NOT_MEASURED
    rows = [
        [named(line).removeprefix(f"{ABLATION} "), time(fused(line)), f"`{size}`", row(line, size)]
        for line in lines
        for size in line["workload"]["sizes"]
    ]
    link = f"![Time relative to the default, by varied size](../images/{PICTURE.name})"
    headers = ["case", "default tiling, µs", "varied", "value: time / default's"]
    table = ["| " + " | ".join(cells) + " |" for cells in (headers, ["---"] * 4, *rows)]
    return "\n".join([link, "", *table])


def fused(line: Line) -> Line:
    """Fused operator with the default tiling."""
    found: Line = line["result"]["sides"]["fused"]
    return found


def row(line: Line, size: str) -> str:
    """Ratio by value, or the status if a side has no time."""
    known, default = ratios(line, size), line["result"]["defaults"][size]
    cells = []
    for value in sorted({default, *line["workload"]["sizes"][size]}):
        if value == default:
            cells.append(f"{value}: default")
        elif value in known:
            cells.append(f"{value}: {known[value]:.2f}")
        else:
            cells.append(f"{value}: {line['result']['sides'][f'{size} {value}']['status']}")
    return ", ".join(cells)


def ratios(line: Line, size: str) -> dict[int, float]:
    """Times over the default's by value, ascending; 1 for the default itself."""
    result = line["result"]
    values = line["workload"]["sizes"][size]
    found = {value: result["ratios"].get(f"{size} {value}") for value in values}
    found[result["defaults"][size]] = 1.0
    return {value: found[value] for value in sorted(found) if found[value] is not None}


def draw_ablation(lines: list[Line], path: Path) -> None:
    """Draw a panel for each varied size, with a line for each case on the most GPUs."""
    from matplotlib.figure import Figure

    from weft.report.figure import save

    most = max(line["origin"]["ranks"] for line in lines)
    shown = [line for line in lines if line["origin"]["ranks"] == most]
    sizes = list(dict.fromkeys(size for line in shown for size in line["workload"]["sizes"]))
    rows = -(-len(sizes) // PANELS)
    figure = Figure(figsize=(12.0, 2.6 * rows + 1.0), layout="constrained")
    panels = list(figure.subplots(rows, PANELS, squeeze=False).flat)
    names: dict[str, Any] = {}
    for axes, size in zip(panels, sizes, strict=False):
        draw_size(axes, size, shown)
        names |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for axes in panels[len(sizes) :]:
        axes.set_visible(False)
    figure.supylabel("time / default's", fontsize=9)
    place = {"loc": "outside lower center", "ncols": 3, "fontsize": 8, "frameon": False}
    figure.legend(list(names.values()), list(names), **place)
    save(figure, path)


def draw_size(axes: Axes, size: str, lines: list[Line]) -> None:
    """Ratios by value for one size; a case has the same colour in all panels."""
    from weft.report.figure import COLOURS, MARKERS
    from weft.units import format_bytes

    points = {
        index: ratios(line, size)
        for index, line in enumerate(lines)
        if size in line["workload"]["sizes"]
    }
    values = sorted({value for known in points.values() for value in known})
    for index, known in points.items():
        axes.plot(
            [values.index(value) for value in known],
            list(known.values()),
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            label=named(lines[index]).removeprefix(f"{ABLATION} "),
        )
    text = format_bytes if size == "slice_bytes" else str
    axes.set_xticks(range(len(values)), [text(value) for value in values], fontsize=8)
    axes.set_title(size, fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
