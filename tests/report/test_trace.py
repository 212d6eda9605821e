import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.report import Arrival, Phase, RankEvents, Write, build_trace, write_trace
from weft.report.trace import SUBMISSIONS


def two_ranks() -> list[RankEvents]:
    """Rank 1's clock is 1 ms behind rank 0's."""
    return [
        RankEvents(
            1,
            "b",
            clock_offset_ns=1_000_000,
            phases=[Phase("receive", 4_000_500, 4_009_000)],
            arrivals=[Arrival(7, 0, 4_003_000), Arrival(99, 0, 4_004_000)],
        ),
        RankEvents(
            0,
            "a",
            phases=[
                Phase("send", 5_000_000, 5_008_000),
                Phase("plan", 5_000_000, 5_000_100),
            ],
            writes=[Write(7, 1, 4096, 5_001_000, 3), Write(8, 1, 0, 5_001_000, 3)],
        ),
    ]


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_ranks_are_processes_in_their_order() -> None:
    names = [e for e in of_kind(build_trace(two_ranks()), "M") if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in names] == ["rank 0 on a", "rank 1 on b"]
    assert [e["pid"] for e in names] == [0, 1]


def test_clocks_are_aligned_and_begin_at_zero() -> None:
    slices = [e for e in of_kind(build_trace(two_ranks()), "X") if e["tid"] < SUBMISSIONS]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("send", 0.0, 8.0),
        ("plan", 0.0, 0.1),
        ("receive", 0.5, 8.5),
    ]


def test_phases_that_cross_get_tracks_of_their_own() -> None:
    phases = [Phase("a", 0, 10), Phase("b", 5, 15), Phase("c", 6, 9), Phase("d", 10, 12)]
    slices = of_kind(build_trace([RankEvents(0, "a", phases=phases)]), "X")
    assert [(e["name"], e["tid"]) for e in slices] == [("a", 0), ("c", 0), ("d", 0), ("b", 1)]


def test_a_write_is_an_arrow_between_two_slices() -> None:
    trace = build_trace(two_ranks())
    (begin,), (end,) = of_kind(trace, "s"), of_kind(trace, "f")
    assert (begin["id"], begin["name"], begin["cat"]) == (end["id"], end["name"], end["cat"])
    assert (begin["pid"], begin["ts"], end["pid"], end["ts"]) == (0, 1.0, 1, 3.0)
    assert end["bp"] == "e"
    assert trace["otherData"] == {"writes": 2, "writes_without_observed_arrival": 1}


def test_writes_of_one_instant_share_a_mark() -> None:
    marks = [e for e in of_kind(build_trace(two_ranks()), "X") if e["tid"] == SUBMISSIONS]
    assert [(e["name"], e["args"]) for e in marks] == [
        ("2 writes", {"bytes": 4096, "peers": [1], "lanes": [3, 3]})
    ]


def test_an_arrival_may_precede_its_write_by_the_error_of_the_clocks() -> None:
    ranks = [
        RankEvents(0, "a", writes=[Write(1, 1, 8, 5_000, 0)]),
        RankEvents(1, "a", arrivals=[Arrival(1, 0, 4_400)], phases=[Phase("wait", 0, 9_000)]),
    ]
    with pytest.raises(ValueError, match="600 ns before it was submitted"):
        build_trace(ranks, clock_error_ns=599)
    trace = build_trace(ranks, clock_error_ns=600)
    assert of_kind(trace, "s")[0]["ts"] == of_kind(trace, "f")[0]["ts"] == 5.0


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([RankEvents(0, "a"), RankEvents(0, "b")], "two records of rank 0"),
        ([RankEvents(0, "a", writes=[Write(1, 1, 8, 0, 0)] * 2)], "submitted twice"),
        ([RankEvents(0, "a", arrivals=[Arrival(1, 1, 0)] * 2)], "observed twice"),
    ],
)
def test_what_contradicts_itself_is_refused(ranks: list[RankEvents], message: str) -> None:
    if message == "observed twice":
        ranks = [*ranks, RankEvents(1, "a", writes=[Write(1, 0, 8, 0, 0)])]
    with pytest.raises(ValueError, match=message):
        build_trace(ranks)


def test_a_phase_cannot_end_before_it_begins() -> None:
    with pytest.raises(ValueError, match="ends before it begins"):
        RankEvents(0, "a", phases=[Phase("plan", 2, 1)])


def test_a_record_may_come_through_json() -> None:
    record = {
        "rank": 0,
        "host": "a",
        "clock_offset_ns": -5,
        "phases": [("plan", 1, 2)],
        "writes": [(1, 1, 8, 1, 0)],
        "arrivals": [(2, 1, 2)],
    }
    events = RankEvents.from_record(json.loads(json.dumps(record)))
    assert events == RankEvents(
        0, "a", -5, [Phase("plan", 1, 2)], [Write(1, 1, 8, 1, 0)], [Arrival(2, 1, 2)]
    )
    with pytest.raises(ValueError, match="no record"):
        RankEvents.from_record(record | {"writes": [(1, 2)]})


def test_a_trace_without_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [])
    assert json.loads(path.read_text())["traceEvents"] == []


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 5000), st.integers(0, 3000)),
        max_size=30,
    ),
    st.lists(st.integers(-(10**9), 10**9), min_size=3, max_size=3),
)
def test_every_trace_is_well_formed(
    flights: list[tuple[int, int, int, int]], offsets: list[int]
) -> None:
    ranks = [
        RankEvents(
            rank,
            "a",
            offsets[rank],
            writes=[
                Write(flow, peer, 8, submit - offsets[rank], 0)
                for flow, (source, peer, submit, _) in enumerate(flights)
                if source == rank
            ],
            arrivals=[
                Arrival(flow, source, submit + flight - offsets[rank])
                for flow, (source, peer, submit, flight) in enumerate(flights)
                if peer == rank
            ],
        )
        for rank in range(3)
    ]
    trace = build_trace(ranks)
    assert json.loads(json.dumps(trace)) == trace

    begins, ends = (Counter(e["id"] for e in of_kind(trace, kind)) for kind in "sf")
    assert begins == ends
    assert len(begins) == begins.total() == len(flights)

    slices = of_kind(trace, "X")
    assert all(e["ts"] >= 0 and e["dur"] > 0 for e in slices)
    for track in {(e["pid"], e["tid"]) for e in slices}:
        of_track = [e for e in slices if (e["pid"], e["tid"]) == track]
        for one, following in pairwise(of_track):
            assert round((one["ts"] + one["dur"]) * 1000) <= round(following["ts"] * 1000)
        at = {e["ts"] for e in of_track}
        arrow_ends = [*of_kind(trace, "s"), *of_kind(trace, "f")]
        assert all(e["ts"] in at for e in arrow_ends if (e["pid"], e["tid"]) == track)
