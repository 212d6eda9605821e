"""Simulated run pictures; matplotlib is imported for the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from weft.base.units import format_bytes
from weft.report.figure import Series, lines, new_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from weft.sim.sweep import Axis

__all__ = ["draw_lines", "draw_links", "draw_timeline", "panels_of"]

#: Most nodes in a heat map.
MOST_NODES: Final = 64
#: Most ranks in a timeline.
MOST_RANKS: Final = 32


def draw_lines(
    panels: Sequence[tuple[str, str, Series]], *, y: str = "seconds", title: str = ""
) -> Figure:
    """Panel for each sweep axis: title, axis, and lines."""
    figure, axes = new_figure(len(panels))
    for each, (name, x, series) in zip(axes, panels, strict=True):
        lines(each, series, title=name, x=x, y=y, sizes=x == "bytes")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def panels_of(
    axes: Sequence[Axis], outcomes: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, Series]]:
    """Sweep panels: one for each swept number, with a line for each algorithm."""
    numbers = [axis for axis in axes if axis.name != "algorithm" and len(axis.values) > 1]
    panels = []
    for axis in numbers:
        # The last value for every other number, so that a panel shows a slice through the grid.
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
    """Link heat map: most concurrent flows, from node (down) to node (across)."""
    import numpy as np

    total: dict[str, float] = {}
    for link in links:
        for end in (link["from"], link["to"]):
            total[end] = total.get(end, 0.0) + link["bytes"]
    if len(total) > MOST_NODES:
        # Only switches: endpoints have one neighbour.
        near: dict[str, set[str]] = {}
        for link in links:
            near.setdefault(link["from"], set()).add(link["to"])
            near.setdefault(link["to"], set()).add(link["from"])
        switches = {node: total[node] for node in total if len(near[node]) > 1}
        total = switches or total
    # The busiest nodes, in name order.
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
    """Sort key for names with numbers: `u2` before `u10`."""
    import re

    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def draw_timeline(trace: Mapping[str, Any], name: str, title: str) -> Figure:
    """Timeline for the first ranks."""
    from weft.report.timeline import draw_timeline as draw
    from weft.sim.spans import rank_events

    return draw(rank_events(trace, name)[:MOST_RANKS], title)
