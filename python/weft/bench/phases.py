"""Durations by phase and round."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from weft.report.events import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["PHASES", "PhaseClock", "PhaseTimes", "summarise"]

PHASES: Final = ("dispatch send", "dispatch recv", "experts", "combine send", "combine recv")


class PhaseClock:
    """Notes when phases begin and end, on the clock that traces use."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Note what the block takes, if it ends without an exception."""
        begin = time.monotonic_ns()
        yield
        self.phases.append(Phase(name, begin, time.monotonic_ns()))

    def durations(self) -> dict[str, list[int]]:
        """Nanoseconds by phase, in round order."""
        durations: dict[str, list[int]] = defaultdict(list)
        for name, begin, end in self.phases:
            durations[name].append(end - begin)
        return dict(durations)


class PhaseTimes(NamedTuple):
    """A phase's durations in microseconds; percentiles over the rounds."""

    phase: str
    p50_us: float
    p99_us: float
    #: The rank with the largest median, and percentiles on it.
    slowest_rank: int
    slowest_p50_us: float
    slowest_p99_us: float


def summarise(by_rank: Sequence[Mapping[str, Iterable[int]]]) -> list[PhaseTimes]:
    """Times by phase, over the rounds on all ranks and on the slowest rank.

    Args:
        by_rank: for each rank, nanoseconds by phase.
    """
    summary = []
    for phase in PHASES:
        times = [np.array(list(rank[phase]), dtype=np.float64) / 1000 for rank in by_rank]
        slowest = max(range(len(times)), key=lambda rank: float(np.median(times[rank])))
        summary.append(
            PhaseTimes(
                phase,
                *percentiles(np.concatenate(times)),
                slowest,
                *percentiles(times[slowest]),
            )
        )
    return summary


def percentiles(values: np.typing.NDArray[np.float64]) -> tuple[float, float]:
    """The 50th and 99th."""
    p50, p99 = np.percentile(values, (50, 99))
    return float(p50), float(p99)
