"""Weft over the provider verbs on the ConnectX-7 network, with the host costs measured here.

A write costs its published posting (an engine beside a NIC) and Weft's own posting and completion,
as measured on a null device, where a NIC takes no time. The published posting contains the
published engine's host, so the sum counts a host twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reproductions.moe_rdma.machines import (
    OPERATIONS,
    PHASES,
    Constants,
    Runs,
    known,
)
from reproductions.report import Table, deviation, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.figure import Figure

__all__ = ["MACHINE", "PRIVATE_ROWS", "RULES", "compare", "host", "picture", "tables", "with_host"]

MACHINE: Final = "cx7"
#: Weft's private rows.
PRIVATE_ROWS: Final = 32
#: Weft's own rules for a round.
RULES: Final[dict[str, Any]] = {"copies": "rank", "private_rows": PRIVATE_ROWS}
#: Records from `make bench-posting`.
POSTING: Final = Path(__file__).parents[2] / "benchmarks" / "results" / "posting.jsonl"
WRITE: Final = "write of a page of 14 KiB"
PART: Final = "part of 8 pages"
#: Most work requests per part in the provider verbs.
PART_REQUESTS: Final = 128
SYSTEMS: Final = {"pplx": "pplx-garden", "deepep": "DeepEP"}


def host(path: Path = POSTING) -> dict[str, Any]:
    """Host costs from the newest record on posts to a null device.

    Returns:
        `write_s`, posting and completion for a write with one work request; `row_s`, each further
        one, with its share in the next part's beginning; both in seconds. `at`, `commit` and
        `processor` are the record's.

    Raises:
        ValueError: if the record lacks an operation, or its times are not positive and rising.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise ValueError(f"{path.name}: no record; run `make bench-posting`")
    record = json.loads(lines[-1])
    cases = {case["operation"]: case for case in record["outcomes"]}
    for operation in (WRITE, PART):
        if operation not in cases:
            raise ValueError(
                f"{path.name}, last record: {operation!r} is missing; run `make bench-posting`"
            )
    write_ns, part_ns = (cases[operation]["complete_ns_p50"] for operation in (WRITE, PART))
    if not 0 < write_ns < part_ns:
        raise ValueError(
            f"{path.name}, last record: {WRITE} {write_ns} ns, {PART} {part_ns} ns: expected"
            " positive times, the second greater; run `make bench-posting`"
        )
    further_ns = (part_ns - write_ns) / (cases[PART]["requests"] - cases[WRITE]["requests"])
    row_ns = further_ns + (write_ns - further_ns) / PART_REQUESTS
    origin = record["origin"]
    return {
        "write_s": write_ns * 1e-9,
        "row_s": row_ns * 1e-9,
        "at": origin["at"],
        "commit": origin["commit"],
        "processor": origin["machine"]["processor"],
    }


def with_host(constants: Constants, costs: dict[str, Any]) -> Constants:
    """Network constants with Weft's host beside the published posting."""
    return constants | {
        "post_s": constants["post_s"] + costs["write_s"],
        "post_row_s": costs["row_s"],
    }


def compare(
    runs: Runs, constants: Constants, costs: dict[str, Any], eps: Sequence[int]
) -> list[dict[str, Any]]:
    """Both operations in each row: published times, the simulated one, and the NIC bound.

    The bound is the mean byte count that a rank sends by its NIC, at the NIC's bandwidth.
    """
    found = []
    for phase, (_, tokens) in PHASES.items():
        for ep in eps:
            results = runs.results(MACHINE, ep, tokens, with_host(constants, costs), **RULES)
            rows = results["rows_per_rank"]["nic"]
            size = {"dispatch": results["row_bytes"], "combine": results["answer_bytes"]}
            for name in OPERATIONS:
                time_us = results[name]["p50_s"] * 1e6
                row = {
                    "phase": phase,
                    "ep": ep,
                    "operation": name,
                    "nic_bound_us": rows * size[name] / constants["bytes_per_s"] * 1e6,
                    "verbs_us": time_us,
                }
                for system in SYSTEMS:
                    was = known(phase, MACHINE, ep, system)[name]
                    row |= {
                        f"{system}_us": was,
                        f"{system}_deviation": deviation(time_us, was),
                    }
                found.append(row)
    return found


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Tables with the rows from `compare`."""
    headers = ["ranks", "operation", "bytes / NIC", "over verbs"]
    for title in SYSTEMS.values():
        headers += [title, "off"]
    for phase, (_, tokens) in PHASES.items():
        yield (
            f"Weft over verbs on ConnectX-7, {phase}: {tokens} tokens of each rank, µs",
            headers,
            [
                (
                    row["ep"],
                    row["operation"],
                    row["nic_bound_us"],
                    row["verbs_us"],
                    *published(row),
                )
                for row in rows
                if row["phase"] == phase
            ],
        )


def published(row: dict[str, Any]) -> list[object]:
    """Cells with the published times and the deviations from them."""
    cells: list[object] = []
    for system in SYSTEMS:
        cells += [row[f"{system}_us"], percent(row[f"{system}_deviation"])]
    return cells


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Time by ranks over verbs, with the published times as markers."""
    from weft.report import figure as plot

    figure, axes = plot.new_figure(2, 5.2, 3.8)
    for each, phase in zip(axes, PHASES, strict=True):
        series: plot.Series = {}
        marks: dict[str, dict[str, list[tuple[float, float]]]] = {system: {} for system in SYSTEMS}
        for row in rows:
            if row["phase"] != phase:
                continue
            series.setdefault(row["operation"], []).append((row["ep"], row["verbs_us"]))
            for system, of_system in marks.items():
                if row[f"{system}_us"] is not None:
                    point = (row["ep"], row[f"{system}_us"])
                    of_system.setdefault(row["operation"], []).append(point)
        for index, (name, points) in enumerate(marks["deepep"].items()):
            each.plot(
                *zip(*points, strict=True),
                linestyle="none",
                marker="x",
                color=plot.COLOURS[index],
                label=f"{name}, {SYSTEMS['deepep']}",
            )
        title = f"Weft over verbs, {phase}"
        plot.lines(each, series, title=title, x="ranks", y="µs", published=marks["pplx"])
        for line in each.get_lines():
            line.set_label(str(line.get_label()).replace("published", SYSTEMS["pplx"]))
        each.legend(fontsize=8, frameon=False)
    return figure
