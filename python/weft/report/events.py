"""Events that each rank recorded during a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Arrival", "Phase", "RankEvents", "Record", "Write", "on_one_clock"]

#: One rank's events as the native module hands them over, or as JSON brought them.
Record: TypeAlias = Mapping[str, Any]


class Phase(NamedTuple):
    """Something a rank was doing."""

    name: str
    begin_ns: int
    end_ns: int


class Write(NamedTuple):
    """A counted write, where it was submitted. Ids are unique for a source and peer pair."""

    flow_id: int
    peer: int
    bytes: int
    submit_ns: int
    lane: int


class Arrival(NamedTuple):
    """The same write, where its arrival was observed."""

    flow_id: int
    source: int
    observed_ns: int


@dataclass(frozen=True)
class RankEvents:
    """One rank's events, in nanoseconds on its clock.

    Raises `ValueError` for a size or a duration below zero.
    """

    rank: int
    host: str
    #: Offset from this rank's clock to the group's clock.
    clock_offset_ns: int = 0
    phases: Sequence[Phase] = field(default=())
    writes: Sequence[Write] = field(default=())
    arrivals: Sequence[Arrival] = field(default=())

    @classmethod
    def from_record(cls, record: Record) -> RankEvents:
        """The events in a record; raises `ValueError` if it is not one."""
        try:
            return cls(
                int(record["rank"]),
                str(record["host"]),
                int(record["clock_offset_ns"]),
                [Phase(str(name), int(begin), int(end)) for name, begin, end in record["phases"]],
                [Write(*map(int, write)) for write in record["writes"]],
                [Arrival(*map(int, arrival)) for arrival in record["arrivals"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no record of a rank's events: {error!r}") from error

    def __post_init__(self) -> None:
        for phase in self.phases:
            if phase.end_ns < phase.begin_ns:
                raise ValueError(f"rank {self.rank}: {phase} ends before it begins")
        for write in self.writes:
            if write.bytes < 0:
                raise ValueError(f"rank {self.rank}: {write} is of less than no bytes")


def on_one_clock(ranks: Iterable[RankEvents]) -> list[RankEvents]:
    """The same events on the group's clock, which begins with the earliest one, by rank.

    Raises `ValueError` if two have the same rank.
    """
    ordered = sorted(ranks, key=lambda events: events.rank)
    for one, following in pairwise(ordered):
        if one.rank == following.rank:
            raise ValueError(f"there are two records of rank {one.rank}")
    begin = min((time for events in ordered for time in group_times(events)), default=0)
    return [shifted(events, events.clock_offset_ns - begin) for events in ordered]


def group_times(events: RankEvents) -> Iterable[int]:
    """Times for all events, on the group's clock."""
    for phase in events.phases:
        yield phase.begin_ns + events.clock_offset_ns
    for write in events.writes:
        yield write.submit_ns + events.clock_offset_ns
    for arrival in events.arrivals:
        yield arrival.observed_ns + events.clock_offset_ns


def shifted(events: RankEvents, by: int) -> RankEvents:
    """The same events, with `by` added to every time."""
    return RankEvents(
        events.rank,
        events.host,
        0,
        [Phase(name, begin + by, end + by) for name, begin, end in events.phases],
        [write._replace(submit_ns=write.submit_ns + by) for write in events.writes],
        [arrival._replace(observed_ns=arrival.observed_ns + by) for arrival in events.arrivals],
    )
