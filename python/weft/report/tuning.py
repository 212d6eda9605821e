"""Picture for `weft tune`: time against size for each algorithm, with the crossovers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.report.figure import Series, lines, new_figure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

__all__ = ["draw_tuning", "label"]


def draw_tuning(found: Mapping[str, Any]) -> Figure:
    """A panel for each collective; dotted lines are crossovers."""
    entry = found["entry"]
    names = list(dict.fromkeys(each["collective"] for each in entry["times"]))
    figure, axes = new_figure(len(names), 4.6)
    for each, name in zip(axes, names, strict=True):
        series: Series = {
            label(curve["algorithm"], curve["chunks"]): [
                (float(size), seconds) for size, seconds in curve["points"]
            ]
            for curve in entry["times"]
            if curve["collective"] == name
        }
        lines(each, series, title=name, x="bytes", y="seconds", sizes=True)
        each.tick_params(axis="x", labelrotation=45)
        for crossover in found["crossovers"]:
            if crossover["collective"] == name:
                each.axvline(crossover["bytes"], color="#999999", linestyle=":", linewidth=1)
    figure.suptitle(
        f"{entry['ranks']} ranks over {entry['provider']}, {entry['machine']};"
        " dotted: another algorithm becomes the fastest",
        fontsize=11,
    )
    return figure


def label(algorithm: str, chunks: int) -> str:
    """Algorithm name, with the chunk count if it has one."""
    return f"{algorithm}, {chunks} chunks" if algorithm in ("tree", "chain") else algorithm
