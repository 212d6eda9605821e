"""Turns rank records into events, with each write's submission and arrival paired.

A lane's value only rises: a write is recorded with the value that its lane will have once it has
landed, an arrival with the value that the owner saw. One look can see several writes at once, so an
arrival with value v stands for all writes with values above the one seen before it, up to v.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.report.events import Arrival, Phase, RankEvents, Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["RankTrace", "collect", "from_instant"]


class WriteRecord(NamedTuple):
    """A write, when it was submitted; `value` is the lane's once all bytes have landed."""

    at_ns: int
    peer: int
    lane: int
    value: int
    bytes: int


class ArrivalRecord(NamedTuple):
    """A lane of this rank, when it was seen to have risen to `value`."""

    at_ns: int
    peer: int
    lane: int
    value: int


@dataclass(frozen=True)
class RankTrace:
    """One rank's records, in nanoseconds on its monotonic clock."""

    rank: int
    host: str
    #: By how much this rank's clock is ahead of rank 0's, and the error bound.
    clock_ahead_ns: int
    clock_error_ns: int
    writes: Sequence[WriteRecord]
    arrivals: Sequence[ArrivalRecord]
    phases: list[Phase]
    #: Records that found no room.
    dropped: int = 0

    def to_json(self) -> dict[str, Any]:
        """A value that `json` can write."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankTrace:
        """Trace from a `to_json` result; raises `ValueError` for another value."""
        try:
            return cls(
                int(value["rank"]),
                str(value["host"]),
                int(value["clock_ahead_ns"]),
                int(value["clock_error_ns"]),
                [WriteRecord(*map(int, record)) for record in value["writes"]],
                [ArrivalRecord(*map(int, record)) for record in value["arrivals"]],
                [Phase(str(name), int(begin), int(end)) for name, begin, end in value["phases"]],
                int(value["dropped"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no record of a rank's trace: {error!r}") from error


def collect(traces: Iterable[RankTrace]) -> list[RankEvents]:
    """Events from all ranks: each observed arrival is assigned to the writes that it stands for.

    A rank reads the clock before it looks at its lanes, so it may see a write that was submitted
    after the time it notes; such a write is taken to have arrived when it was submitted.
    """
    recorded = list(traces)
    # A write's id is its place in the rank's list.
    by_lane: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    for trace in recorded:
        for number, write in enumerate(trace.writes):
            submitted = write.at_ns - trace.clock_ahead_ns
            by_lane[write.peer, write.lane].append((write.value, number, trace.rank, submitted))
    return [
        RankEvents(
            trace.rank,
            trace.host,
            -trace.clock_ahead_ns,
            list(trace.phases),
            [
                Write(number, write.peer, write.bytes, write.at_ns, write.lane)
                for number, write in enumerate(trace.writes)
            ],
            arrivals_of(trace, by_lane),
        )
        for trace in recorded
    ]


def arrivals_of(
    trace: RankTrace, by_lane: Mapping[tuple[int, int], list[tuple[int, int, int, int]]]
) -> list[Arrival]:
    """The writes that a rank saw arrive."""
    waiting = {
        lane: sorted(writes, reverse=True)
        for (owner, lane), writes in by_lane.items()
        if owner == trace.rank
    }
    arrived = []
    for record in sorted(trace.arrivals):
        writes = waiting.get(record.lane, [])
        while writes and writes[-1][0] <= record.value:
            _, number, source, submitted = writes.pop()
            observed = max(record.at_ns, submitted + trace.clock_ahead_ns)
            arrived.append(Arrival(number, source, observed))
    return arrived


def from_instant(ranks: Iterable[RankEvents], begin_ns: int) -> list[RankEvents]:
    """Events from `begin_ns` on the group's clock, for a part of a run."""
    chosen = []
    for events in ranks:
        begin = begin_ns - events.clock_offset_ns
        chosen.append(
            RankEvents(
                events.rank,
                events.host,
                events.clock_offset_ns,
                [phase for phase in events.phases if phase.begin_ns >= begin],
                [write for write in events.writes if write.submit_ns >= begin],
                [arrival for arrival in events.arrivals if arrival.observed_ns >= begin],
            )
        )
    return chosen
