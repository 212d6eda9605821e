"""Runs of the simulator: one, or one for each point of a grid."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from weft import _native
from weft.cli.progress import Progress
from weft.units import parse_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["Axis", "Point", "parse_axes", "run_points", "simulate"]

#: A run's share is counted in so many steps.
STEPS: Final = 1000
#: What may be swept, and whether it is a size.
SWEPT: Final = {"bytes": True, "ranks": False, "tokens": False, "seed": False}


class Axis(NamedTuple):
    """What changes from run to run."""

    name: str
    values: list[Any]


class Point(NamedTuple):
    """One run of a grid."""

    #: The values of the axes, by name.
    at: dict[str, Any]
    spec: dict[str, Any]


def simulate(
    spec: Mapping[str, Any], progress: Callable[[float, str], bool] | None = None
) -> dict[str, Any]:
    """Run a scenario.

    Raises:
        ConfigurationError: if it cannot be; says which field, and what it must be.
        SimulationError: if it has no end: a deadlock, or bytes for a failed link.
    """
    outcome: dict[str, Any] = json.loads(_native.simulate(json.dumps(spec), progress))
    return outcome


def parse_axes(texts: Iterable[str], allowed: Sequence[str]) -> list[Axis]:
    """Axes from `bytes=1KiB..256MiB` and the like.

    Raises:
        ValueError: if one is none, or is named twice.
    """
    axes: list[Axis] = []
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or name not in allowed:
            raise ValueError(f"{text!r} is none of {', '.join(f'{each}=...' for each in allowed)}")
        if any(axis.name == name for axis in axes):
            raise ValueError(f"{name} is swept twice")
        axes.append(Axis(name, list(parse_range(values, sizes=SWEPT[name]))))
    return axes


def points(
    axes: Sequence[Axis], spec_at: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[Point]:
    """The grid that axes span; without axes it is one point."""
    grid = itertools.product(*(axis.values for axis in axes))
    places = [dict(zip((axis.name for axis in axes), values, strict=True)) for values in grid]
    return [Point(at, spec_at(at)) for at in places]


def run_points(grid: Sequence[Point], *, label: str, progress: bool) -> list[dict[str, Any]]:
    """Run every point; the outcomes, each with `at`, where on the grid it is."""
    outcomes = []
    with Progress(label, STEPS * len(grid), enabled=progress) as bar:
        for number, point in enumerate(grid):

            def tell(share: float, _: str, before: int = number * STEPS) -> bool:
                bar.advance(max(0, before + int(share * STEPS) - bar.done))
                return True

            outcomes.append({"at": point.at, **simulate(point.spec, tell)})
            bar.advance((number + 1) * STEPS - bar.done)
    return outcomes
