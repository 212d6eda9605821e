"""Figures for reports and simulations: axes, lines, bars and files.

matplotlib is imported for the first figure.
"""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING, Final

from weft.base.output_files import write_output
from weft.base.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "MARKERS",
    "SUFFIXES",
    "Series",
    "check_target",
    "draw_bars",
    "lines",
    "new_figure",
    "save",
]

SUFFIXES: Final = (".png", ".svg")
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

#: Line points, by name.
Series = dict[str, list[tuple[float, float]]]


def check_target(path: Path) -> None:
    """Check that a picture can be drawn and written to `path`.

    Raises:
        ValueError: if it cannot, with the remedy.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"--plot {path}: expected a file name that ends in {' or '.join(SUFFIXES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--plot: pictures need matplotlib, which is not installed: pip install 'weft[plot]'"
        )


def save(figure: Figure, path: Path) -> None:
    """Write a picture; equal pictures have equal bytes."""
    from matplotlib import rc_context

    # No date, and a fixed salt for names.
    dated = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "weft", "svg.fonttype": "path"}):
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix.removeprefix("."), metadata=dated)
    write_output(path, picture.getvalue())


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
    """Lines for simulated values; published ones as hollow markers in the same colour."""
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


def draw_bars(
    groups: Sequence[str], bars: Mapping[str, Sequence[float | None]], *, title: str, y: str
) -> Figure:
    """Bar groups side by side, without bars for missing values."""
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
