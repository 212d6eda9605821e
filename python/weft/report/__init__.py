"""Run reports: a trace, and a timeline picture."""

from weft.report.collect import RankTrace, collect
from weft.report.events import Arrival, Phase, RankEvents, Write
from weft.report.trace import build_trace, write_trace

__all__ = [
    "Arrival",
    "Phase",
    "RankEvents",
    "RankTrace",
    "Write",
    "build_trace",
    "collect",
    "write_trace",
]
