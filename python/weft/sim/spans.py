"""What a simulated run recorded, as events of ranks: for Perfetto and for pictures."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from weft.report.events import Phase, RankEvents

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["rank_events"]

THREAD: Final = re.compile(r"rank (\d+) (.*)")
NS_PER_US: Final = 1000


def rank_events(trace: Mapping[str, Any], name: str) -> list[RankEvents]:
    """The spans of a trace of the simulator, rank by rank; where a host stands there is `name`."""
    phases: defaultdict[int, list[Phase]] = defaultdict(list)
    for event in trace["traceEvents"]:
        found = THREAD.fullmatch(str(event["tid"]))
        if event["ph"] != "X" or found is None:
            continue
        begin = round(event["ts"] * NS_PER_US)
        end = round((event["ts"] + event["dur"]) * NS_PER_US)
        phases[int(found[1])].append(Phase(event["name"], begin, max(begin, end)))
    return [RankEvents(rank, name, phases=phases[rank]) for rank in sorted(phases)]
