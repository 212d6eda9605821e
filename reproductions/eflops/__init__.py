"""EFLOPS reproduction (Dong et al., HPCA 2020), figure by figure; docs/eflops.md is its page.

- `clusters`: networks and rank placements
- `columns`: all-reduces and training with one constant set
- `sweeps`: sizes, GPU counts, constants
- `comparison`: the article's figures beside the published ones
- `scenarios`: the cluster with both constant sets, and the models
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from reproductions.eflops.clusters import BIGRAPH
from reproductions.eflops.columns import ALGORITHMS, COLUMNS, LARGE, RANKS, Column
from reproductions.eflops.comparison import (
    application_rows,
    figures,
    single_nic_rows,
    train_all,
)
from reproductions.eflops.sweeps import ranks_weight, sweep_constants, sweep_ranks, sweep_sizes
from reproductions.report import Table, percent, read
from weft.base.progress import Progress
from weft.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from matplotlib.figure import Figure

__all__ = ["NAME", "TITLE", "notes", "pictures", "reproduce", "tables"]

NAME: Final = "eflops"
TITLE: Final = "The EFLOPS article, simulated"
#: Parameters for a whole run.
FULL: Final[dict[str, Any]] = {
    "sizes": [1 << power for power in range(10, 29, 2)],
    "ranks": [16, 32, 64, 128, 256, 512],
    "seeds": 3,
    "sensitivity": True,
}
#: Parameters for a `--quick` run.
QUICK: Final[dict[str, Any]] = {
    "sizes": [1 << 10, 1 << 28],
    "ranks": [16, 64],
    "seeds": 1,
    "sensitivity": False,
}


def reproduce(*, seed: int, quick: bool, progress: bool) -> dict[str, Any]:
    """Simulate the article.

    Args:
        seed: first ECMP hash seed; times are medians over the seeds from there on.
        quick: two sizes, two GPU counts, one seed, no sensitivity.
        progress: whether to show a progress bar.
    """
    options = QUICK if quick else FULL
    published = read("eflops", "published.json")
    results: dict[str, Any] = {"source": published["source"], "cluster": published["cluster"]}
    columns = [Column(name, seed=seed, seeds=options["seeds"]) for name in COLUMNS]
    with Progress("EFLOPS", weight(options), enabled=progress) as bar:
        trained = {}
        sizes, scaling, applications, single_nic = [], [], [], []
        for column in columns:
            sizes += sweep_sizes(column, options["sizes"], bar.advance)
            scaling += sweep_ranks(column, options["ranks"], bar.advance)
            runs = train_all(column, bar.advance)
            applications += application_rows(column.name, runs, published)
            single_nic += single_nic_rows(column.name, runs, published["published"])
            trained[column.name] = runs
        comparison = figures(columns, trained, published["published"], bar.advance)
        fitted = columns[-1]
        sensitivity = sweep_constants(fitted, bar.advance) if options["sensitivity"] else []
    headline = fitted.measure(BIGRAPH, RANKS, "hdrm", LARGE)
    return {
        "article": NAME,
        "spec": {"scenario": NAME, "seed": seed} | (QUICK if quick else {}),
        "time_s": headline.time_s,
        "max_link_load": headline.max_link_load,
        "cpu_s": sum(column.cpu_s for column in columns),
        "constants": fitted.constants,
        "flows": sum(column.flows for column in columns),
        "links": [],
        "results": results
        | {
            "columns": {column.name: column.constants for column in columns},
            "constants": published["constants"],
            "comparison": comparison,
            "sizes": sizes,
            "scaling": scaling,
            "single_nic": single_nic,
            "applications": applications,
            "sensitivity": sensitivity,
        },
    }


def weight(options: dict[str, Any]) -> int:
    """Progress bar steps."""
    sweeps = 8 * len(options["sizes"]) + sum(4 * ranks_weight(ranks) for ranks in options["ranks"])
    training, comparison = 36, 6
    return 2 * (sweeps + training + comparison) + (64 if options["sensitivity"] else 0)


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """Result tables."""
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
    """Times by algorithm, along sizes or ranks."""
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
    """Sentences below the tables."""
    return [
        f"Published: {found['results']['source']}; {found['results']['cluster']}.",
        f"{found['flows']:,} messages simulated in {found['cpu_s']:.3g} s of one core.",
    ]


def pictures(found: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Bandwidth by size on both networks, and time by GPU count."""
    from weft.report import figure as plot

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
