"""Run trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

Ranks are processes, phases are slices, and a write is an arrow from where it was submitted to where
its arrival was observed. An arrow needs a slice at both ends, so each rank has two more tracks with
a short mark, whose length is arbitrary, for every submission and arrival.

The form is Chromium's Trace Event Format: times are microseconds, "X" is a slice, "s" and "f" are
an arrow's two ends, "M" is metadata, "C" a counter.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from weft.base.output_files import write_output
from weft.report.events import RankEvents, on_one_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from weft.report.events import Phase

__all__ = ["build_trace", "write_trace"]

# A rank's tracks: the first ones are as many as the phases need.
SUBMISSIONS: Final = 1000
ARRIVALS: Final = 1001
LONGEST_MARK_NS: Final = 1000

Event: TypeAlias = dict[str, Any]
Timed = TypeVar("Timed")


def write_trace(path: str | Path, ranks: Iterable[RankEvents], **options: Any) -> None:
    """Write the trace from `build_trace` to a file."""
    write_output(path, json.dumps(build_trace(ranks, **options)))


def build_trace(ranks: Iterable[RankEvents], *, clock_error_ns: int = 0) -> Event:
    """Run trace, as a value that `json` can write.

    Args:
        ranks: each rank's events; the offsets align the clocks.
        clock_error_ns: how far the offsets may be off. A write that arrives before it was submitted
            by no more than that is drawn as arriving at once.

    Raises:
        ValueError: if a duration is negative, two ranks or two writes have the same number, or a
            write arrives earlier than the clocks' error allows.
    """
    aligned = on_one_clock(ranks)
    flows = Flows(aligned, clock_error_ns)
    events = [event for rank in aligned for event in rank_events(rank, flows)]
    return {
        "displayTimeUnit": "ns",
        "otherData": {
            "writes": len(flows.submitted),
            "writes_without_observed_arrival": len(flows.submitted) - len(flows.observed),
        },
        "traceEvents": events,
    }


class Flows:
    """Which submission and which arrival are the same write, under one number for the trace."""

    def __init__(self, ranks: Sequence[RankEvents], clock_error_ns: int) -> None:
        self.submitted: dict[FlowKey, int] = {}
        self.observed: dict[FlowKey, int] = {}
        for rank in ranks:
            for write in rank.writes:
                key = FlowKey(rank.rank, write.peer, write.flow_id)
                if key in self.submitted:
                    raise ValueError(f"{key} was submitted twice")
                self.submitted[key] = write.submit_ns
        self.numbers = {key: number for number, key in enumerate(self.submitted, start=1)}
        for rank in ranks:
            for arrival in rank.arrivals:
                key = FlowKey(arrival.source, rank.rank, arrival.flow_id)
                if key in self.observed:
                    raise ValueError(f"{key} was observed twice")
                if key in self.submitted:
                    self.observed[key] = self.observation(key, arrival.observed_ns, clock_error_ns)

    def observation(self, key: FlowKey, observed_ns: int, clock_error_ns: int) -> int:
        """A write's arrival time: not before it was submitted, within the clock error."""
        early = self.submitted[key] - observed_ns
        if early > clock_error_ns:
            raise ValueError(
                f"{key} was observed {early} ns before it was submitted:"
                f" the clocks' offsets are off by more than {clock_error_ns} ns"
            )
        return max(observed_ns, self.submitted[key])


class FlowKey(NamedTuple):
    """Key that identifies a write."""

    source: int
    destination: int
    flow_id: int

    def __str__(self) -> str:
        return f"write {self.flow_id} from rank {self.source} to rank {self.destination}"


def rank_events(rank: RankEvents, flows: Flows) -> Iterator[Event]:
    """Everything in the trace that belongs to one rank."""
    process = f"rank {rank.rank} on {rank.host}"
    yield metadata(rank, "process_name", 0, {"name": process})
    yield metadata(rank, "process_sort_index", 0, {"sort_index": rank.rank})
    for track, phases in enumerate(nested(rank.phases)):
        yield from track_named(rank, track, "phases")
        for name, begin, end in phases:
            yield slice_event(rank, track, name, begin, end - begin)
    yield from track_named(rank, SUBMISSIONS, "writes submitted")
    yield from submissions(rank, flows)
    yield from track_named(rank, ARRIVALS, "writes arrived")
    yield from arrivals(rank, flows)


def nested(phases: Iterable[Phase]) -> list[list[Phase]]:
    """The phases by track: on one, they lie side by side or within one another, as slices must."""
    tracks: list[list[Phase]] = []
    around: list[list[int]] = []
    for phase in sorted(phases, key=lambda phase: (phase.begin_ns, -phase.end_ns)):
        for track, ends in zip(tracks, around, strict=True):
            while ends and ends[-1] <= phase.begin_ns:
                ends.pop()
            if not ends or phase.end_ns <= ends[-1]:
                track.append(phase)
                ends.append(phase.end_ns)
                break
        else:
            tracks.append([phase])
            around.append([phase.end_ns])
    return tracks


def submissions(rank: RankEvents, flows: Flows) -> Iterator[Event]:
    """A mark for each time at which writes were submitted, and the starts of their arrows."""
    for begin, length, writes in marks(rank.writes, lambda write: write.submit_ns):
        total = sum(write.bytes for write in writes)
        peers = sorted({write.peer for write in writes})
        details = {"bytes": total, "peers": peers, "lanes": [write.lane for write in writes]}
        name = f"{len(writes)} writes" if len(writes) > 1 else f"write to {peers[0]}"
        yield slice_event(rank, SUBMISSIONS, name, begin, length, details)
        for write in writes:
            key = FlowKey(rank.rank, write.peer, write.flow_id)
            if key in flows.observed:
                yield flow_event(rank, SUBMISSIONS, "s", begin, flows.numbers[key])


def arrivals(rank: RankEvents, flows: Flows) -> Iterator[Event]:
    """A mark for each time at which writes were seen to arrive, and the arrow ends."""
    known = [
        arrival._replace(observed_ns=flows.observed[key])
        for arrival in rank.arrivals
        if (key := FlowKey(arrival.source, rank.rank, arrival.flow_id)) in flows.observed
    ]
    for begin, length, group in marks(known, lambda arrival: arrival.observed_ns):
        sources = sorted({arrival.source for arrival in group})
        name = f"{len(group)} arrivals" if len(group) > 1 else f"arrival from {sources[0]}"
        yield slice_event(rank, ARRIVALS, name, begin, length, {"sources": sources})
        for arrival in group:
            key = FlowKey(arrival.source, rank.rank, arrival.flow_id)
            yield flow_event(rank, ARRIVALS, "f", begin, flows.numbers[key])


def marks(
    events: Iterable[Timed], time: Callable[[Timed], int]
) -> Iterator[tuple[int, int, list[Timed]]]:
    """Each mark's begin, length and events: events at one instant share a mark.

    Slices in one track must not overlap, so a mark ends before the next one begins: by a nanosecond
    where there is one, which readers that round times down may lose.
    """
    groups = [(at, list(group)) for at, group in groupby(sorted(events, key=time), time)]
    for index, (begin, group) in enumerate(groups):
        room = groups[index + 1][0] - begin if index + 1 < len(groups) else LONGEST_MARK_NS
        yield begin, min(LONGEST_MARK_NS, max(1, room - 1)), group


def slice_event(
    rank: RankEvents,
    track: int,
    name: str,
    begin_ns: int,
    length_ns: int,
    details: Event | None = None,
) -> Event:
    """A slice in a track."""
    event: Event = {"ph": "X", "pid": rank.rank, "tid": track, "name": name, "cat": "weft"}
    event |= {"ts": begin_ns / 1000, "dur": length_ns / 1000}
    return event | ({"args": details} if details else {})


def flow_event(rank: RankEvents, track: int, end: str, at_ns: int, number: int) -> Event:
    """One arrow end: "s" where it starts, "f" where it finishes."""
    event = {"ph": end, "pid": rank.rank, "tid": track, "name": "write", "cat": "write"}
    event |= {"ts": at_ns / 1000, "id": number}
    # Bind to the slice around this time; without this an end binds to the next slice instead.
    return event | ({"bp": "e"} if end == "f" else {})


def track_named(rank: RankEvents, track: int, name: str) -> Iterator[Event]:
    """A track's name and place among the rank's tracks."""
    yield metadata(rank, "thread_name", track, {"name": name})
    yield metadata(rank, "thread_sort_index", track, {"sort_index": track})


def metadata(rank: RankEvents, name: str, track: int, details: Event) -> Event:
    """Metadata for a process or a track: name or position."""
    return {"ph": "M", "pid": rank.rank, "tid": track, "name": name, "args": details}
