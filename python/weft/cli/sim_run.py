"""Execution of `weft sim`: runs scenarios, prints outcomes, writes traces and pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.output_files import OutputFile, check_outputs, plot_file, write_output
from weft.base.progress import Progress
from weft.cli import sim_scenarios as scenarios
from weft.cli import sim_tables
from weft.cli.stored import Storing

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
#: Most spans in a trace, and most links in a heat map.
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
    from weft.base.errors import ConfigurationError, ShapeError, SimulationError, SizeError
    from weft.report.figure import check_target
    from weft.sim.sweep import STEPS, parse_axes, points, run_points

    try:
        axes = [*extra, *parse_axes(arguments.sweep, arguments.swept)]
        grid = points(axes, lambda at: spec_at(arguments, at))
        check_outputs(outputs(arguments), inputs(arguments, grid[0].spec))
        if arguments.plot is not None:
            check_target(arguments.plot)
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
    storing = Storing("weft sim")
    written = keep(arguments, scenario, axes, outcomes, storing)
    found = sim_tables.as_json(scenario, grid, outcomes) | written
    if arguments.json:
        print(json.dumps(found))
    else:
        # Sweep points share the network's warnings.
        warned = [text for outcome in outcomes for text in outcome.get("warnings", ())]
        for warning in dict.fromkeys(warned):
            print(f"weft sim: warning: {warning}", file=sys.stderr)
        sim_tables.print_tables(scenario, outcomes)
        for what, path in written.items():
            print(f"\n{what.capitalize():8}  {path}")
    return storing.status()


def outputs(arguments: argparse.Namespace) -> list[OutputFile]:
    """Files that the options name."""
    files = []
    if arguments.trace is not None:
        files.append(OutputFile("--trace", arguments.trace, "Perfetto trace"))
    if arguments.plot is not None:
        files.append(plot_file(arguments.plot))
    return files


def inputs(arguments: argparse.Namespace, spec: dict[str, Any]) -> list[Path]:
    """Paths that the run may read: option values, and the network of a scenario file."""
    options = ("file", "topology", "model", "token_routing")
    named = [getattr(arguments, name, None) for name in options]
    cluster = spec.get("cluster")
    named.append(cluster.get("topology") if isinstance(cluster, dict) else None)
    return [Path(each) for each in named if isinstance(each, (str, Path))]


def keep(
    arguments: argparse.Namespace,
    scenario: str,
    axes: Sequence[Any],
    outcomes: Sequence[dict[str, Any]],
    storing: Storing,
) -> dict[str, str]:
    """Write the requested trace and picture; returns the stored paths by kind."""
    from weft.report.figure import save
    from weft.sim import plot

    written = {}
    trace = outcomes[0].pop("trace", None)
    if arguments.trace is not None:
        text = json.dumps(trace)
        if storing.attempt("--trace", arguments.trace, lambda: write_output(arguments.trace, text)):
            written["trace"] = str(arguments.trace)
    if arguments.plot is not None:
        if len(outcomes) > 1:
            panels = plot.panels_of(axes, outcomes)
            figure = plot.draw_lines(panels, title=scenario)
        elif arguments.picture == "timeline":
            figure = plot.draw_timeline(trace, scenario, f"weft sim: {scenario}")
        else:
            figure = plot.draw_links(outcomes[0]["links"], title=f"link loads, {scenario}")
        if storing.attempt("--plot", arguments.plot, lambda: save(figure, arguments.plot)):
            written["plot"] = str(arguments.plot)
    for outcome in outcomes:
        del outcome["links"][LINKS_SHOWN:]
    return written
