"""Makes docs/lab.md: tables and a picture from the last line in benchmarks/results/lab.jsonl."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

ROOT = Path(__file__).parent.parent
for folder in (ROOT, ROOT / "python"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from lab.report import binary, connections, most_connections, tables  # noqa: E402
from reproductions.report import markdown  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lab.experiment import Record

RESULTS: Final = ROOT / "benchmarks" / "results" / "lab.jsonl"
PICTURE: Final = ROOT / "docs" / "images" / "lab-links.svg"
#: Picture panels: network, algorithm, title.
PANELS: Final = (
    ("bigraph", "hdrm", "BiGraph, HDRM"),
    ("bigraph", "ring", "BiGraph, ring"),
    ("bigraph", "hd", "BiGraph, HD, hashed"),
    ("fat-tree", "hd", "fat tree, HD, hashed"),
)


def last() -> dict[str, Any]:
    """The last result line."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8").splitlines()[-1])
    return found


def blocks(page: str) -> dict[str, str]:
    """Page tables, by block name."""
    run = last()
    records = run["results"]
    (_, headers, rows), (_, step_headers, step_rows) = tables(records)
    return {
        "setting": setting(run),
        "comparison": comparison(records),
        "times": markdown(headers, rows),
        "connections": markdown(step_headers, step_rows),
    }


def setting(run: dict[str, Any]) -> str:
    """Sentences about the network, the machine and the constants."""
    timed = [record for record in run["results"] if record["kind"] == "time"]
    first, machine = timed[0], run["origin"]["machine"]
    message = median(record["constants"]["message_latency_s"] for record in timed)
    resent = sum(record["retransmissions"] for record in timed)
    return "\n".join(
        [
            f"- {first['hosts']} hosts, {first['switches']} switches, links of "
            f"{first['megabits']:g} Mbit/s, MTU {first['mtu']}",
            f"- {machine['cores']} cores ({machine['processor']}), Linux {machine['kernel']}",
            f"- constants of the prediction: `wire_efficiency` "
            f"{first['constants']['wire_efficiency']:.4f}, from the MTU; `message_latency_s` "
            f"{message * 1e6:.0f} µs (median), measured between two ranks",
            f"- heartbeats take {max(record['idle_share'] for record in timed):.2%} of the busiest "
            f"link; TCP sent {resent} segments again in all {len(timed)} runs",
        ]
    )


def comparison(records: list[Record]) -> str:
    """Measured beside predicted times, a row for each size."""
    times: dict[tuple[str, int], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["kind"] == "time":
            times[record["network"], record["bytes"]][record["algorithm"]].append(record)
    names = ("ring", "hd", "hdrm")
    headers = ["network", "bytes", *(f"{name}{each}" for name in names for each in ("", ", sim"))]
    rows = []
    for (network, size), by_algorithm in times.items():
        row: list[object] = [network, binary(size)]
        for name in names:
            group = by_algorithm.get(name)
            row += [
                f"{median(each[key] for each in group):.3f} s" if group else ""
                for key in ("seconds", "predicted_s")
            ]
        rows.append(row)
    return markdown(headers, rows)


def draw(page: str) -> list[Path]:
    """Draw the page's picture."""
    from weft.report.figure import save

    save(figure(last()["results"]), PICTURE)
    return [PICTURE]


def figure(records: list[Record]) -> Figure:
    """Heat maps of the connections on each link in each step, measured above predicted."""
    from matplotlib.figure import Figure

    steps = {(each["network"], each["algorithm"]): each for each in records if "measured" in each}
    panels = [panel for panel in PANELS if panel[:2] in steps]
    most = max(most_connections(steps[panel[:2]], "predicted") for panel in panels)
    made = Figure(figsize=(3.1 * len(panels), 5.0), dpi=110, layout="constrained")
    axes = made.subplots(2, len(panels), squeeze=False)
    for column, (network, algorithm, title) in enumerate(panels):
        record = steps[network, algorithm]
        for row, name in enumerate(("measured", "predicted")):
            each = axes[row][column]
            cells = connections(record, name)
            mesh = each.imshow(cells, cmap="viridis", vmin=0, vmax=most, aspect="auto")
            each.set_title(f"{title}\n{name}: at most {most_connections(record, name):.2f}", size=9)
            each.tick_params(labelsize=7)
            if column == 0:
                each.set_ylabel("step", size=8)
            if row == 1:
                each.set_xlabel("link between switches", size=8)
    bar = made.colorbar(mesh, ax=axes, shrink=0.6)
    bar.set_label("bytes, in units of one connection's", size=8)
    return made
