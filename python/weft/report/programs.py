"""Kernel timeline: program spans on all ranks, as a trace file and as a picture.

The trace is in the Trace Event Format, the same as in `weft.report.trace`: ranks are processes,
programs are threads, spans are slices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from weft.base.output_files import write_output

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from matplotlib.figure import Figure

__all__ = ["ProgramSpan", "Timeline"]

#: Spans in a picture beyond which an .svg file has pixels instead of shapes.
_MOST_SHAPES: Final = 2000


class ProgramSpan(NamedTuple):
    """Time that a program spent in one thing, in nanoseconds on the timeline's clock."""

    rank: int
    program: int
    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Timeline:
    """Program spans in one kernel launch, on all ranks.

    Attributes:
        spans: by rank, program and begin. Time 0 is the earliest begin.
        clock_error_ns: largest error between two ranks' clocks; 0 for one rank.
        resolution_ns: greatest common divisor over the times read: the device clock's step, or a
        multiple.
        dropped: number of spans that found no room.
    """

    spans: Sequence[ProgramSpan]
    clock_error_ns: int = 0
    resolution_ns: int = 1
    dropped: int = 0

    def overlap_ns(self, rank: int, one: Iterable[str], other: Iterable[str]) -> int:
        """Time in which `rank` has a program in `one` while another is in `other`.

        Args:
            rank: where the programs ran.
            one: span names, for example `["send"]`.
            other: span names.

        Returns:
            Nanoseconds.
        """
        first = _union(span for span in self.spans if span.rank == rank and span.name in {*one})
        second = _union(span for span in self.spans if span.rank == rank and span.name in {*other})
        return sum(
            max(0, min(end, its_end) - max(begin, its_begin))
            for begin, end in first
            for its_begin, its_end in second
        )

    def to_trace(self) -> dict[str, Any]:
        """The trace, as a value that `json` can write; times are in microseconds."""
        return {
            "displayTimeUnit": "ns",
            "otherData": {
                "clock_error_ns": self.clock_error_ns,
                "resolution_ns": self.resolution_ns,
                "dropped": self.dropped,
            },
            "traceEvents": list(self._events()),
        }

    def write_trace(self, path: str | Path) -> None:
        """Write the trace as a JSON file, which Perfetto and chrome://tracing open."""
        write_output(path, json.dumps(self.to_trace()))

    def draw(self, title: str = "") -> Figure:
        """Picture: a row for each program, a colour for each name. Needs matplotlib."""
        from matplotlib.patches import Patch

        from weft.report.figure import COLOURS, new_figure

        tracks = self._tracks()
        ranks = [rank for (rank, _), _ in tracks]
        names = list(dict.fromkeys(span.name for span in self.spans))
        end = max((span.end_ns for span in self.spans), default=0)
        unit_ns, unit = (1000, "µs") if end < 10_000_000 else (1_000_000, "ms")
        # A program has at least a one-pixel line, and at most 0.2 inches.
        height = 1.6 + min(8.0, 0.2 * len(tracks))
        figure, (axes,) = new_figure(1, 9.0, height)
        for row, (_, spans) in enumerate(tracks):
            # A program's inner spans over those around them.
            bars = [
                (span.begin_ns / unit_ns, (span.end_ns - span.begin_ns) / unit_ns) for span in spans
            ]
            colours = [COLOURS[names.index(span.name) % len(COLOURS)] for span in spans]
            drawn = axes.broken_barh(bars, (row - 0.45, 0.9), facecolors=colours)
            drawn.set_rasterized(len(self.spans) > _MOST_SHAPES)
        for row, (one, following) in enumerate(pairwise(ranks)):
            if one != following:
                axes.axhline(row + 0.5, color="black", linewidth=0.8)
        middles = {
            rank: _middle(row for row, of in enumerate(ranks) if of == rank) for rank in ranks
        }
        axes.set_yticks(list(middles.values()), [f"rank {rank}" for rank in middles])
        axes.set_ylim(max(1, len(tracks)) - 0.5, -0.5)
        axes.set_xlim(left=0)
        error = f"{self.clock_error_ns / unit_ns:.3g} {unit}"
        axes.set_xlabel(f"time in {unit} (error between ranks: {error} or less)")
        axes.set_title(title, fontsize=10)
        figure.legend(
            handles=[
                Patch(color=COLOURS[index % len(COLOURS)], label=name)
                for index, name in enumerate(names)
            ],
            loc="outside lower center",
            ncols=max(1, min(6, len(names))),
            frameon=False,
            fontsize=8,
        )
        return figure

    def write_picture(self, path: str | Path, title: str = "") -> None:
        """Write the picture from `draw` as an .svg or .png file.

        Raises:
            ValueError: if the file cannot be written, or matplotlib is not installed.
        """
        from weft.report.figure import check_target, save

        check_target(Path(path))
        save(self.draw(title), Path(path))

    def _tracks(self) -> list[tuple[tuple[int, int], list[ProgramSpan]]]:
        """Spans by rank and program."""
        ordered = sorted(
            self.spans, key=lambda span: (span.rank, span.program, span.begin_ns, -span.end_ns)
        )
        return [
            (place, list(spans))
            for place, spans in groupby(ordered, key=lambda span: (span.rank, span.program))
        ]

    def _events(self) -> Iterator[dict[str, Any]]:
        named = -1
        for (rank, program), spans in self._tracks():
            track = {"pid": rank, "tid": program}
            if rank != named:
                named = rank
                yield _metadata(track, "process_name", {"name": f"rank {rank}"})
                yield _metadata(track, "process_sort_index", {"sort_index": rank})
            yield _metadata(track, "thread_name", {"name": f"program {program}"})
            yield _metadata(track, "thread_sort_index", {"sort_index": program})
            for span in spans:
                times = {"ts": span.begin_ns / 1000, "dur": (span.end_ns - span.begin_ns) / 1000}
                yield {"ph": "X", "name": span.name, "cat": "weft", **track, **times}


def _metadata(track: dict[str, Any], name: str, details: dict[str, Any]) -> dict[str, Any]:
    """Name or position for a process or a track."""
    return {"ph": "M", "name": name, **track, "args": details}


def _union(spans: Iterable[ProgramSpan]) -> list[tuple[int, int]]:
    """Intervals that the spans cover, in order, disjoint."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted((span.begin_ns, span.end_ns) for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _middle(rows: Iterable[int]) -> float:
    """Middle position between consecutive rows."""
    listed = list(rows)
    return (listed[0] + listed[-1]) / 2
