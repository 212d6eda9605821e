"""Execution of `weft sim`: runs scenarios, prints outcomes, writes traces and pictures."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Final

from weft.cli import sim_scenarios as scenarios
from weft.cli import sim_tables
from weft.cli.progress import Progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = [
    "run_allreduce",
    "run_dlrm",
    "run_file",
    "run_moe",
    "run_query",
    "run_train",
]

#: Busiest links that a table shows.
LINKS_SHOWN: Final = 8
#: Largest numbers of spans of a trace and of links of a heat map.
MOST_SPANS: Final = 200_000
MOST_LINKS: Final = 100_000


def run_allreduce(arguments: argparse.Namespace) -> int:
    """Run collectives."""
    return run_grid(arguments, scenarios.allreduce, scenarios.algorithms(arguments))


def run_moe(arguments: argparse.Namespace) -> int:
    """Run dispatch and combine."""
    return run_grid(arguments, scenarios.moe, [])


def run_train(arguments: argparse.Namespace) -> int:
    """Run training."""
    return run_grid(arguments, scenarios.train, scenarios.algorithms(arguments))


def run_dlrm(arguments: argparse.Namespace) -> int:
    """Run a recommendation model."""
    return run_grid(arguments, scenarios.dlrm, [])


def run_query(arguments: argparse.Namespace) -> int:
    """Run queries."""
    return run_grid(arguments, scenarios.query, [])


def run_file(arguments: argparse.Namespace) -> int:
    """Run a scenario from a file."""
    try:
        spec = scenarios.from_file(arguments.file)
    except ValueError as error:
        arguments.usage_error(str(error))
    arguments.sweep, arguments.swept = [], ()
    return run_grid(arguments, lambda _, __: spec, [])


def run_grid(
    arguments: argparse.Namespace,
    spec_at: Callable[[argparse.Namespace, dict[str, Any]], dict[str, Any]],
    extra: Sequence[Any],
) -> int:
    """Run one scenario, or one for each point of a sweep; print and write the outcomes."""
    from weft.errors import ConfigurationError, ShapeError, SimulationError, SizeError
    from weft.sim import plot
    from weft.sim.sweep import STEPS, parse_axes, points, run_points

    try:
        axes = [*extra, *parse_axes(arguments.sweep, arguments.swept)]
        grid = points(axes, lambda at: spec_at(arguments, at))
        if arguments.plot is not None:
            plot.check_target(arguments.plot)
        if arguments.trace is not None and not arguments.trace.absolute().parent.is_dir():
            raise ValueError(
                f"--trace {arguments.trace}: no directory {arguments.trace.parent}; create it first"
            )
        single = len(grid) == 1
        if not single and arguments.trace is not None:
            raise ValueError("--trace: expected a single run; pass no --sweep and one --algorithm")
        for point in grid:
            point.spec["links"] = MOST_LINKS if single and arguments.plot else LINKS_SHOWN
            timeline = arguments.plot is not None and arguments.picture == "timeline"
            if single and (arguments.trace is not None or timeline):
                point.spec["trace"] = MOST_SPANS
    except ValueError as error:
        arguments.usage_error(str(error))
    try:
        with Progress("points", STEPS * len(grid), enabled=not arguments.json) as bar:
            outcomes = run_points(grid, bar.advance)
    except (ConfigurationError, ShapeError, SizeError) as error:
        arguments.usage_error(str(error))
    except SimulationError as error:
        print(f"weft sim: {error}", file=sys.stderr)
        return 1
    scenario = grid[0].spec["scenario"]
    written = keep(arguments, scenario, axes, outcomes)
    found = sim_tables.as_json(scenario, grid, outcomes) | written
    if arguments.json:
        print(json.dumps(found))
    else:
        # Points of a sweep share their network's warnings.
        warned = [text for outcome in outcomes for text in outcome.get("warnings", ())]
        for warning in dict.fromkeys(warned):
            print(f"weft sim: warning: {warning}", file=sys.stderr)
        sim_tables.print_tables(scenario, outcomes)
        for what, path in written.items():
            print(f"\n{what.capitalize():8}  {path}")
    return 0


def keep(
    arguments: argparse.Namespace,
    scenario: str,
    axes: Sequence[Any],
    outcomes: Sequence[dict[str, Any]],
) -> dict[str, str]:
    """Write the requested trace and picture; their paths by kind."""
    from weft.sim import plot

    written = {}
    trace = outcomes[0].pop("trace", None)
    if arguments.trace is not None:
        arguments.trace.write_text(json.dumps(trace), encoding="utf-8")
        written["trace"] = str(arguments.trace)
    if arguments.plot is not None:
        if len(outcomes) > 1:
            panels = plot.panels_of(axes, outcomes)
            figure = plot.draw_lines(panels, title=scenario)
        elif arguments.picture == "timeline":
            figure = plot.draw_timeline(trace, scenario, f"weft sim: {scenario}")
        else:
            figure = plot.draw_links(outcomes[0]["links"], title=f"link loads, {scenario}")
        plot.save(figure, arguments.plot)
        written["plot"] = str(arguments.plot)
    for outcome in outcomes:
        del outcome["links"][LINKS_SHOWN:]
    return written
