"""Pictures of simulated runs; matplotlib is imported for the first one."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Final

from weft.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from weft.sim.sweep import Axis

__all__ = [
    "SUFFIXES",
    "Series",
    "check_target",
    "draw_bars",
    "draw_lines",
    "draw_links",
    "draw_timeline",
    "panels_of",
    "save",
]

SUFFIXES: Final = (".png", ".svg")
#: Largest number of nodes of a heat map.
MOST_NODES: Final = 64
#: Largest number of ranks of a timeline.
MOST_RANKS: Final = 32
#: Okabe and Ito's palette, distinguishable with colour blindness.
COLOURS: Final = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#999999",
)
MARKERS: Final = "osD^vPX*"

#: Points of lines, by name.
Series = dict[str, list[tuple[float, float]]]


def check_target(path: Path) -> None:
    """Check that a picture can be drawn and written to `path`.

    Raises:
        ValueError: if it cannot, with the remedy.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a file name that ends in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: no directory {path.parent}; create it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "pictures need matplotlib, which is not installed: pip install 'weft[plot]'"
        )


def save(figure: Figure, path: Path) -> None:
    """Write a picture; equal pictures have equal bytes."""
    from matplotlib import rc_context

    # No date, and a fixed salt of names.
    dated = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "weft", "svg.fonttype": "path"}):
        figure.savefig(path, metadata=dated)


def new_figure(
    columns: int = 1, width: float = 7.0, height: float = 4.2
) -> tuple[Figure, list[Axes]]:
    """Figure with axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), dpi=110, layout="constrained")
    axes = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for each in axes:
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def lines(
    axes: Axes,
    series: Series,
    *,
    title: str,
    x: str,
    y: str,
    published: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    sizes: bool = False,
) -> None:
    """Lines of simulated values; published ones as hollow markers of the same colour."""
    for index, (name, points) in enumerate(series.items()):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=name)
        known = (published or {}).get(name)
        if known:
            axes.plot(
                *zip(*known, strict=True),
                linestyle="none",
                marker=marker,
                markersize=8,
                markerfacecolor="none",
                markeredgecolor=colour,
                label=f"{name}, published",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({point[0] for points in series.values() for point in points})
    if len(ticks) > 8:
        ticks = ticks[:: -(-len(ticks) // 8)]
    label = format_bytes if sizes else (lambda tick: f"{tick:g}")
    axes.set_xticks(ticks, [label(tick) for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(fontsize=8, frameon=False)


def draw_lines(
    panels: Sequence[tuple[str, str, Series]], *, y: str = "seconds", title: str = ""
) -> Figure:
    """Panel for each axis of a sweep: its title, its axis, and the lines."""
    figure, axes = new_figure(len(panels))
    for each, (name, x, series) in zip(axes, panels, strict=True):
        lines(each, series, title=name, x=x, y=y, sizes=x == "bytes")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def panels_of(
    axes: Sequence[Axis], outcomes: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, Series]]:
    """Panels of a sweep: one for each swept number, with a line for each algorithm."""
    numbers = [axis for axis in axes if axis.name != "algorithm" and len(axis.values) > 1]
    panels = []
    for axis in numbers:
        # The last value of every other number, so that a panel shows a slice of the grid.
        last = {other.name: other.values[-1] for other in numbers if other is not axis}
        series: Series = {}
        for outcome in outcomes:
            at = outcome["at"]
            if any(at[name] != value for name, value in last.items()):
                continue
            name = str(at.get("algorithm", "time"))
            series.setdefault(name, []).append((at[axis.name], outcome["time_s"]))
        also = ", ".join(
            f"{name} {format_bytes(value) if name == 'bytes' else value}"
            for name, value in last.items()
        )
        panels.append((f"by {axis.name}" + (f" ({also})" if also else ""), axis.name, series))
    if not panels:
        names = [str(outcome["at"].get("algorithm", "time")) for outcome in outcomes]
        points = {name: [(1.0, each["time_s"])] for name, each in zip(names, outcomes, strict=True)}
        panels.append(("time", "run", points))
    return panels


def draw_links(links: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Heat map of links: most concurrent flows, from node (down) to node (across)."""
    import numpy as np

    total: dict[str, float] = {}
    for link in links:
        for end in (link["from"], link["to"]):
            total[end] = total.get(end, 0.0) + link["bytes"]
    if len(total) > MOST_NODES:
        # Switches alone: endpoints have one neighbour.
        near: dict[str, set[str]] = {}
        for link in links:
            near.setdefault(link["from"], set()).add(link["to"])
            near.setdefault(link["to"], set()).add(link["from"])
        switches = {node: total[node] for node in total if len(near[node]) > 1}
        total = switches or total
    # The busiest nodes, in the order of their names.
    busiest = sorted(total, key=lambda node: -total[node])[:MOST_NODES]
    names = sorted(busiest, key=natural)
    place = {name: at for at, name in enumerate(names)}
    loads = np.full((len(names), len(names)), np.nan)
    for link in links:
        if link["from"] in place and link["to"] in place:
            at = place[link["from"]], place[link["to"]]
            loads[at] = np.nanmax([loads[at], link["max_load"]])
    side = 3.0 + 0.14 * len(names)
    figure, (axes,) = new_figure(1, side + 1, side)
    image = axes.imshow(loads, cmap="viridis", vmin=0)
    axes.grid(visible=False)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_xlabel("to")
    axes.set_ylabel("from")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="most concurrent flows", shrink=0.8)
    return figure


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of names with numbers: `u2` before `u10`."""
    import re

    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def draw_timeline(trace: Mapping[str, Any], name: str, title: str) -> Figure:
    """Timeline of the first ranks."""
    from weft.report.timeline import draw_timeline as draw
    from weft.sim.spans import rank_events

    return draw(rank_events(trace, name)[:MOST_RANKS], title)


def draw_bars(
    groups: Sequence[str], bars: Mapping[str, Sequence[float | None]], *, title: str, y: str
) -> Figure:
    """Groups of bars side by side, without the bars of missing values."""
    figure, (axes,) = new_figure(1, max(7.0, 0.55 * len(groups) * len(bars) + 2))
    width = 0.8 / len(bars)
    for index, (name, values) in enumerate(bars.items()):
        places = [group + (index - (len(bars) - 1) / 2) * width for group in range(len(groups))]
        known = [(x, value) for x, value in zip(places, values, strict=True) if value is not None]
        if known:
            left, heights = zip(*known, strict=True)
            axes.bar(left, heights, width=width, label=name, color=COLOURS[index])
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(y)
    axes.legend(fontsize=8, frameon=False)
    return figure
