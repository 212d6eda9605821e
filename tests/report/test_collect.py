import json

from weft.report import Phase, RankTrace, build_trace, collect
from weft.report.collect import ArrivalRecord, WriteRecord, from_instant


def source(*writes: WriteRecord, rank: int = 0, ahead: int = 0) -> RankTrace:
    return RankTrace(rank, "a", ahead, 0, writes, [], [])


def owner(*arrivals: ArrivalRecord, rank: int = 1, ahead: int = 0) -> RankTrace:
    return RankTrace(rank, "b", ahead, 0, [], arrivals, [])


def observed(traces: list[RankTrace], rank: int = 1) -> dict[tuple[int, int], int]:
    (events,) = [events for events in collect(traces) if events.rank == rank]
    return {(arrival.source, arrival.flow_id): arrival.observed_ns for arrival in events.arrivals}


def test_one_look_can_stand_for_several_writes() -> None:
    writes = [WriteRecord(10 * i, 1, 5, i, 8) for i in range(1, 5)]
    arrivals = [ArrivalRecord(100, 0, 5, 1), ArrivalRecord(200, 0, 5, 3)]
    assert observed([source(*writes), owner(*arrivals)]) == {(0, 0): 100, (0, 1): 200, (0, 2): 200}


def test_a_write_of_several_parts_arrives_with_its_last() -> None:
    writes = [WriteRecord(1, 1, 5, 3, 8), WriteRecord(2, 1, 5, 4, 8)]
    arrivals = [ArrivalRecord(10, 0, 5, 2), ArrivalRecord(20, 0, 5, 3), ArrivalRecord(30, 0, 5, 4)]
    assert observed([source(*writes), owner(*arrivals)]) == {(0, 0): 20, (0, 1): 30}


def test_lanes_belong_to_their_owner() -> None:
    """Ranks 1 and 2 each own a lane 5."""
    writes = [WriteRecord(1, 1, 5, 1, 8), WriteRecord(1, 2, 5, 1, 8)]
    traces = [
        source(*writes),
        owner(ArrivalRecord(10, 0, 5, 1)),
        owner(ArrivalRecord(20, 0, 5, 1), rank=2),
    ]
    assert observed(traces) == {(0, 0): 10}
    assert observed(traces, rank=2) == {(0, 1): 20}


def test_a_trace_may_begin_in_the_middle() -> None:
    traces = [source(WriteRecord(50, 1, 5, 9, 8)), owner(ArrivalRecord(60, 0, 5, 9))]
    assert observed(traces) == {(0, 0): 60}


def test_no_write_arrives_before_it_was_submitted() -> None:
    """Rank 1's clock is 1000 ns ahead, so its time precedes the write's submission."""
    traces = [
        source(WriteRecord(50, 1, 5, 1, 8)),
        owner(ArrivalRecord(1045, 0, 5, 1), ahead=1000),
    ]
    assert observed(traces) == {(0, 0): 1050}
    assert build_trace(collect(traces))["otherData"]["writes_without_observed_arrival"] == 0


def test_json_brings_everything_back() -> None:
    trace = RankTrace(
        3,
        "a",
        7,
        1,
        [WriteRecord(1, 2, 3, 4, 5)],
        [ArrivalRecord(1, 2, 3, 4)],
        [Phase("x", 1, 2)],
        6,
    )
    assert RankTrace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_a_part_of_a_run_is_what_began_in_it() -> None:
    writes = [WriteRecord(10, 1, 5, 1, 8), WriteRecord(20, 1, 5, 2, 8)]
    arrivals = [ArrivalRecord(115, 0, 5, 1), ArrivalRecord(125, 0, 5, 2)]
    ranks = collect([source(*writes), owner(*arrivals, ahead=100)])
    first, second = from_instant(ranks, 16)
    assert [write.submit_ns for write in first.writes] == [20]
    assert [arrival.observed_ns for arrival in second.arrivals] == [125]
