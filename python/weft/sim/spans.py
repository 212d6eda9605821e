"""What a simulated run recorded, as events of ranks: for pictures."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from weft.report.events import Phase, RankEvents

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["rank_events"]

#: A process of a trace is a job and a rank of it.
RANK_BITS: Final = 24
NS_PER_US: Final = 1000


def rank_events(trace: Mapping[str, Any], name: str) -> list[RankEvents]:
    """The spans of a trace of the simulator, rank by rank; where a host stands there is `name`.

    Ranks of further jobs on the same network have numbers of their own, and the job beside them.
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
