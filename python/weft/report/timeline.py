"""Run picture: a row for each rank, a bar for each phase, a thin line for each write.

A write's line ends in a dot where it arrived.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from weft.base.output_files import write_output
from weft.report.events import RankEvents, on_one_clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw_timeline", "write_timeline"]

# Distinct also for colour-blind readers (Okabe and Ito's palette).
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
#: More lines than this would hide the bars.
MOST_WRITES_DRAWN: Final = 400
BAR_HEIGHT: Final = 0.6
UNITS: Final = ((10_000, 1, "ns"), (10_000_000, 1_000, "µs"), (10_000_000_000, 1_000_000, "ms"))


def write_timeline(path: str | Path, ranks: Iterable[RankEvents], title: str = "") -> None:
    """Write the picture from `draw_timeline` as a PNG file."""
    picture = io.BytesIO()
    draw_timeline(ranks, title).savefig(picture, format="png")
    write_output(path, picture.getvalue())


def draw_timeline(ranks: Iterable[RankEvents], title: str = "") -> Figure:
    """Draw a run; needs matplotlib, which `pip install weft[demo]` brings.

    Raises `ValueError` if two ranks have the same number.
    """
    aligned = on_one_clock(ranks)
    # In the order in which they first come, on whichever rank.
    phases = sorted(
        (phase for rank in aligned for phase in rank.phases), key=lambda phase: phase.begin_ns
    )
    phase_names = list(dict.fromkeys(phase.name for phase in phases))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(phase_names)}
    unit_ns, unit = time_unit(aligned)

    figure = Figure(figsize=(12, 1.8 + 0.5 * max(1, len(aligned))), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row, rank in enumerate(aligned):
        for name, colour in colours.items():
            bars = [
                (begin / unit_ns, (end - begin) / unit_ns)
                for phase, begin, end in rank.phases
                if phase == name
            ]
            axes.broken_barh(bars, (row - BAR_HEIGHT / 2, BAR_HEIGHT), facecolors=colour)
    drawn, writes = draw_writes(axes, aligned, unit_ns)

    axes.set_yticks(range(len(aligned)), [f"rank {rank.rank}\n{rank.host}" for rank in aligned])
    axes.set_ylim(max(1, len(aligned)) - 0.5, -0.5)
    axes.margins(x=0.01)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"time in {unit}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    note = f"{writes:,} writes" if drawn == writes else f"{drawn:,} of {writes:,} writes drawn"
    axes.set_title(f"{title} ({note})" if title else note, loc="left")
    if phase_names:
        figure.legend(
            handles=[Patch(color=colours[name], label=name) for name in phase_names],
            loc="outside lower center",
            ncols=min(6, len(phase_names)),
            frameon=False,
        )
    return figure


def draw_writes(axes: Axes, ranks: Sequence[RankEvents], unit_ns: int) -> tuple[int, int]:
    """Draw the writes whose arrival was observed; returns how many were drawn, out of how many."""
    rows = {rank.rank: row for row, rank in enumerate(ranks)}
    observed = {
        (arrival.source, rank.rank, arrival.flow_id): arrival.observed_ns
        for rank in ranks
        for arrival in rank.arrivals
    }
    lines = [
        [(write.submit_ns / unit_ns, rows[rank.rank]), (arrival / unit_ns, rows[write.peer])]
        for rank in ranks
        for write in rank.writes
        if (arrival := observed.get((rank.rank, write.peer, write.flow_id))) is not None
    ]
    # Every k-th one, so that the drawn writes are spread over the whole run.
    chosen = lines[:: -(-len(lines) // MOST_WRITES_DRAWN) or 1]
    axes.add_collection(LineCollection(chosen, colors="black", linewidths=0.4, alpha=0.5))
    times, arrived_at = [end[0] for _, end in chosen], [end[1] for _, end in chosen]
    axes.scatter(times, arrived_at, s=4, c="black", linewidths=0, zorder=3)
    return len(chosen), sum(len(rank.writes) for rank in ranks)


def time_unit(ranks: Sequence[RankEvents]) -> tuple[int, str]:
    """Nanoseconds per unit in which this run's times are short numbers, and the unit name."""
    end = max((phase.end_ns for rank in ranks for phase in rank.phases), default=0)
    return next(((size, name) for limit, size, name in UNITS if end < limit), (1_000_000_000, "s"))
