"""The EFLOPS article: every figure beside the published one.

The scenario itself is native (`crates/predict/src/eflops`); here it becomes tables and pictures.
`docs/eflops.md` tells the story.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from weft.cli.progress import Progress
from weft.sim.article import Table, markdown, percent
from weft.sim.sweep import STEPS, simulate
from weft.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from matplotlib.figure import Figure

__all__ = ["document", "notes", "pictures", "reproduce", "tables"]

ALGORITHMS: Final = ("ring", "tree", "hd", "hdrm")
COLUMNS: Final = ("ideal", "fitted")
#: What `--quick` leaves.
QUICK: Final[dict[str, Any]] = {
    "sizes": [1 << 10, 1 << 28],
    "ranks": [16, 64],
    "seeds": 1,
    "sensitivity": False,
}


def reproduce(*, seed: int, quick: bool, progress: bool) -> dict[str, Any]:
    """Simulate the article.

    Args:
        seed: of the hash of routes.
        quick: two sizes, two numbers of ranks, no sensitivity.
        progress: whether to show how far it is.
    """
    spec: dict[str, Any] = {"scenario": "eflops", "seed": seed} | (QUICK if quick else {})
    with Progress("EFLOPS", STEPS, enabled=progress) as bar:

        def tell(share: float, _: str) -> bool:
            bar.advance(max(0, int(share * STEPS) - bar.done))
            return True

        outcome = simulate(spec, tell)
    return {"article": "eflops", "spec": spec} | outcome


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The tables, for people."""
    results = found["results"]
    yield (
        "Beside what was published",
        ("figure", "published", "ideal", "off", "fitted", "off"),
        [
            (
                row["figure"],
                row["published"],
                row["ideal"],
                percent(row.get("ideal_deviation")),
                row["fitted"],
                percent(row.get("fitted_deviation")),
            )
            for row in results["comparison"]
        ],
    )
    for column in COLUMNS:
        for network in dict.fromkeys(row["network"] for row in results["sizes"]):
            rows = [
                row
                for row in results["sizes"]
                if (row["column"], row["network"]) == (column, network)
            ]
            yield by_algorithm(f"All-reduce on {network}, 64 GPUs, {column}", "bytes", rows)
        for size in dict.fromkeys(row["bytes"] for row in results["scaling"]):
            rows = [
                row for row in results["scaling"] if (row["column"], row["bytes"]) == (column, size)
            ]
            title = f"Scaling, {format_bytes(size)}, {column}: HDRM on BiGraph, others on fat tree"
            yield by_algorithm(title, "ranks", rows)
    yield (
        "Applications, 64 GPUs: HDRM over ring",
        ("column", "model", "overlap", "communication", "published", "end to end", "published"),
        [
            (
                row["column"],
                row["model"],
                row["overlap"],
                percent(row["communication_gain"]),
                percent(row["published_communication_gain"]),
                percent(row["end_to_end_gain"]),
                percent(row["published_end_to_end_gain"]),
            )
            for row in results["applications"]
        ],
    )
    yield (
        "The classifier with one NIC for four GPUs, beside one for each",
        ("column", "baseline", "ranks", "communication", "published", "end to end", "published"),
        [
            (
                row["column"],
                row["algorithm"],
                row["order"],
                row["communication_ratio"],
                row["published_ratio"],
                percent(row["end_to_end_gain"]),
                percent(row["published_gain"]),
            )
            for row in results["single_nic"]
        ],
    )
    yield (
        "Constants of the fitted column",
        ("constant", "value", "fitted to", "from"),
        [
            (row["name"], row["value"], row.get("fitted_to"), row["from"])
            for row in results["constants"]
        ],
    )
    if results["sensitivity"]:
        headers = ("constant", "times", "1 KiB ring/HDRM", "HDRM Gb/s", "ring Gb/s", "HD Gb/s")
        rows = [
            (
                row["constant"],
                row["factor"],
                row["small_ring_over_hdrm"],
                row["large_hdrm_gbps"],
                row["large_ring_gbps"],
                row["large_hd_gbps"],
            )
            for row in results["sensitivity"]
        ]
        yield "Sensitivity of the fitted column (large: 256 MiB)", headers, rows


def by_algorithm(title: str, along: str, rows: Iterable[dict[str, Any]]) -> Table:
    """Times of all algorithms, along sizes or ranks."""
    cells: dict[int, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(row[along], {})[row["algorithm"]] = format_seconds(row["time_s"])
    names = [name for name in ALGORITHMS if any(name in row for row in cells.values())]
    listed = [
        (format_bytes(place) if along == "bytes" else place, *(row.get(name) for name in names))
        for place, row in cells.items()
    ]
    return title, (along, *names), listed


def notes(found: dict[str, Any]) -> list[str]:
    """What is said below the tables."""
    return [
        f"Published: {found['results']['source']}; {found['results']['cluster']}.",
        f"{found['flows']:,} messages simulated in {found['cpu_s']:.3g} s of one core.",
    ]


def document(found: dict[str, Any]) -> str:
    """The same as a page."""
    parts = ["# The EFLOPS article, simulated\n"]
    for title, headers, rows in tables(found):
        parts.append(f"\n## {title}\n\n{markdown(headers, rows)}")
    return "\n".join([*parts, "", *notes(found)]) + "\n"


def pictures(found: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Bandwidth by size on both networks, and time by number of GPUs."""
    from weft.sim import plot

    results = found["results"]
    networks = list(dict.fromkeys(row["network"] for row in results["sizes"]))
    figure, axes = plot.new_figure(len(networks), 5.4, 3.9)
    for each, network in zip(axes, networks, strict=True):
        series: plot.Series = {}
        for row in results["sizes"]:
            if (row["column"], row["network"]) == ("fitted", network):
                point = (row["bytes"], row["algorithm_bandwidth_gbps"])
                series.setdefault(row["algorithm"], []).append(point)
        title = f"64 GPUs, {network}, fitted constants"
        plot.lines(each, series, title=title, x="bytes", y="Gb/s", sizes=True)
    yield "eflops-sizes.svg", figure
    sizes = list(dict.fromkeys(row["bytes"] for row in results["scaling"]))
    figure, axes = plot.new_figure(len(sizes), 5.4, 3.9)
    for each, size in zip(axes, sizes, strict=True):
        series = {}
        for row in results["scaling"]:
            if (row["column"], row["bytes"]) == ("fitted", size):
                point = (row["ranks"], row["time_s"])
                series.setdefault(row["algorithm"], []).append(point)
        title = f"{format_bytes(size)}, fitted constants"
        plot.lines(each, series, title=title, x="GPUs", y="seconds")
    yield "eflops-scaling.svg", figure
    rows = [
        row for row in results["applications"] if row["column"] == "fitted" and not row["overlap"]
    ]
    names = [row["model"] for row in rows]
    bars = {
        "communication, simulated": "communication_gain",
        "communication, published": "published_communication_gain",
        "end to end, simulated": "end_to_end_gain",
        "end to end, published": "published_end_to_end_gain",
    }
    shares = {
        label: [None if row[key] is None else 100 * row[key] for row in rows]
        for label, key in bars.items()
    }
    yield (
        "eflops-applications.svg",
        plot.draw_bars(names, shares, title="HDRM over ring", y="gain in %"),
    )
