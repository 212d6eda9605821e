"""Simulated run spans as rank events, for timelines."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from weft.report.events import Phase, RankEvents

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["rank_events"]

#: Rank bits in a trace's process number; the job is above them.
RANK_BITS: Final = 24
NS_PER_US: Final = 1000


def rank_events(trace: Mapping[str, Any], name: str) -> list[RankEvents]:
    """Spans in a simulator trace, rank by rank, with `name` in place of the host.

    Ranks in further jobs on the same network have separate numbers and `job N` as host.
    """
    phases: defaultdict[int, list[Phase]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        begin = round(event["ts"] * NS_PER_US)
        end = round((event["ts"] + event["dur"]) * NS_PER_US)
        phases[event["pid"]].append(Phase(event["name"], begin, max(begin, end)))
    found = []
    for process in sorted(phases):
        job = process >> RANK_BITS
        found.append(RankEvents(process, f"job {job}" if job else name, phases=phases[process]))
    return found
