"""Kernel program timelines: trace file and picture."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from weft.report.programs import ProgramSpan, Timeline


def pipeline(ranks: int = 2, programs: int = 3) -> Timeline:
    """Programs that compute and send by turns, each half a step behind the one before."""
    spans = []
    for rank in range(ranks):
        for program in range(programs):
            begin = 500 * program + 100 * rank
            spans.append(ProgramSpan(rank, program, "all", begin, begin + 4000))
            for step in range(4):
                at = begin + 1000 * step
                spans.append(ProgramSpan(rank, program, "compute", at, at + 600))
                spans.append(ProgramSpan(rank, program, "send", at + 600, at + 1000))
    return Timeline(spans, clock_error_ns=1300, resolution_ns=32)


def events(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_ranks_are_processes_and_programs_are_threads() -> None:
    trace = pipeline().to_trace()
    names = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in named(trace)]
    assert names == [
        each
        for rank in range(2)
        for each in [
            ("process_name", rank, 0, f"rank {rank}"),
            *(("thread_name", rank, tid, f"program {tid}") for tid in range(3)),
        ]
    ]


def named(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in events(trace, "M") if e["name"].endswith("_name")]


def test_every_event_has_the_fields_of_the_format(tmp_path: Path) -> None:
    made = pipeline()
    made.write_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert trace == made.to_trace()
    assert trace["displayTimeUnit"] == "ns"
    assert trace["otherData"] == {"clock_error_ns": 1300, "resolution_ns": 32, "dropped": 0}
    assert len(events(trace, "X")) == len(made.spans)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            # Microseconds, to the nanosecond.
            for field in ("ts", "dur"):
                assert event[field] >= 0
                assert round(event[field] * 1000) / 1000 == event[field]
        else:
            assert set(event["args"]) <= {"name", "sort_index"}


def test_slices_of_a_thread_nest() -> None:
    tracks = defaultdict(list)
    for event in events(pipeline().to_trace(), "X"):
        begin = round(event["ts"] * 1000)
        tracks[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
    for slices in tracks.values():
        ends: list[int] = []
        for begin, end in slices:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)


def test_overlap_is_time_in_both() -> None:
    one = Timeline([ProgramSpan(0, 0, "a", 0, 10), ProgramSpan(0, 1, "b", 4, 7)])
    assert one.overlap_ns(0, ["a"], ["b"]) == 3
    assert one.overlap_ns(1, ["a"], ["b"]) == 0
    several = Timeline(
        [
            *(ProgramSpan(0, p, "a", begin, begin + 5) for p, begin in enumerate((0, 3, 20))),
            *(ProgramSpan(0, p, "b", begin, begin + 10) for p, begin in enumerate((6, 12))),
        ]
    )
    # a: 0 to 8 and 20 to 25; b: 6 to 22.
    assert several.overlap_ns(0, ["a"], ["b"]) == 2 + 2
    assert several.overlap_ns(0, ["a"], ["a", "b"]) == 13


def test_the_picture_has_a_row_for_each_program(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = pipeline()
    (axes,) = made.draw("title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert list(axes.get_yticks()) == [1.0, 4.0]
    assert axes.get_xlabel() == "time in µs (error between ranks: 1.3 µs or less)"
    for name in ("a.svg", "b.svg", "a.png"):
        made.write_picture(tmp_path / name, "title")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    with pytest.raises(ValueError, match=r"expected a file name that ends in \.png or \.svg"):
        made.write_picture(tmp_path / "a.gif")


def test_a_timeline_without_spans_is_drawn_and_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Timeline([]).write_picture(tmp_path / "a.svg")
    assert Timeline([]).to_trace()["traceEvents"] == []
