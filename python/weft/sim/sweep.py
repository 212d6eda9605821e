"""Simulator runs: one scenario, or one for each grid point."""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from weft import _native
from weft.base.arguments import expect_json
from weft.base.units import parse_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "STEPS",
    "SWEPT",
    "Axis",
    "Point",
    "parse_axes",
    "points",
    "run_points",
    "schedule",
    "simulate",
]

#: Progress steps per run.
STEPS: Final = 1000
#: Most runs in a grid.
MOST_RUNS: Final = 10_000
#: Sweep axes; true if the values are sizes in bytes.
SWEPT: Final = {"bytes": True, "ranks": False, "tokens": False, "seed": False}


class Axis(NamedTuple):
    """Parameter that differs between the runs in a grid, with values."""

    name: str
    values: list[Any]


class Point(NamedTuple):
    """One run in a grid."""

    #: Axis values by name.
    at: dict[str, Any]
    spec: dict[str, Any]


def simulate(
    spec: Mapping[str, Any], progress: Callable[[float, str], bool] | None = None
) -> dict[str, Any]:
    """Run a scenario; the outcome as JSON values.

    Args:
        spec: the scenario, as in docs/simulator.md.
        progress: called with the share that is done and the stage; False cancels the run.

    Raises:
        ConfigurationError: if a field is out of range; names the field and the expected value.
        SimulationError: if the run cannot end: a deadlock, or bytes for a failed link.
    """
    outcome: dict[str, Any] = json.loads(_native.simulate(expect_json(spec, "spec"), progress))
    return outcome


def schedule(job: Mapping[str, Any]) -> dict[str, Any]:
    """Schedule for a collective job, with all ranks' operations.

    Args:
        job: as in scenarios, with `ranks` (docs/simulator.md).

    Returns:
        The schedule; a scenario takes it back as `job.program`.

    Raises:
        ConfigurationError: if a field is out of range, or the schedule has over 2**20 operations.
    """
    found: dict[str, Any] = json.loads(_native.schedule(expect_json(job, "job")))
    return found


def parse_axes(texts: Iterable[str], allowed: Sequence[str]) -> list[Axis]:
    """Axes from `bytes=1KiB..256MiB` and the like.

    Raises:
        ValueError: for an unknown or repeated axis.
    """
    axes: list[Axis] = []
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or name not in allowed:
            expected = ", ".join(f"{each}=..." for each in allowed)
            raise ValueError(f"--sweep {text!r}: expected one of {expected}")
        if any(axis.name == name for axis in axes):
            raise ValueError(f"--sweep {name}: given twice; pass each axis once")
        axes.append(Axis(name, list(parse_range(values, sizes=SWEPT[name]))))
    return axes


def points(
    axes: Sequence[Axis], spec_at: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[Point]:
    """Grid spanned by axes; one point without axes.

    Raises:
        ValueError: if it has more than 10,000 points, or by `spec_at`.
    """
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_RUNS:
        names = ", ".join(axis.name for axis in axes)
        raise ValueError(f"{count} runs of {names}: expected at most {MOST_RUNS}; sweep fewer")
    grid = itertools.product(*(axis.values for axis in axes))
    places = [dict(zip((axis.name for axis in axes), values, strict=True)) for values in grid]
    return [Point(at, spec_at(at)) for at in places]


def run_points(grid: Sequence[Point], advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """Run every point; the outcomes, each with the axis values as `at`.

    Args:
        grid: the points.
        advance: called with progress steps, `STEPS` for each point in all.
    """
    outcomes = []
    for point in grid:
        progress = Steps(advance)
        outcomes.append({"at": point.at, **simulate(point.spec, progress)})
        progress(1.0, "done")
    return outcomes


class Steps:
    """One run's progress in whole steps."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance
        self.done = 0

    def __call__(self, share: float, _stage: str) -> bool:
        """Advance to a share of the run."""
        done = int(share * STEPS)
        if done > self.done:
            self.advance(done - self.done)
            self.done = done
        return True
