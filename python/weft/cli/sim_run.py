"""`weft sim` when its arguments are parsed: scenarios are run, and what came out shown and kept."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Final

from weft.cli.table import format_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = [
    "run_allreduce",
    "run_article",
    "run_dlrm",
    "run_file",
    "run_moe",
    "run_query",
    "run_train",
]

#: Links of the busiest that people are shown.
LINKS_SHOWN: Final = 8
#: Spans of a trace, and links of a heat map, that are enough for any picture.
MOST_SPANS: Final = 200_000
MOST_LINKS: Final = 100_000


def run_allreduce(arguments: argparse.Namespace) -> int:
    """Run collectives."""
    from weft.sim import scenarios

    return run_grid(arguments, scenarios.allreduce, scenarios.algorithms(arguments))


def run_moe(arguments: argparse.Namespace) -> int:
    """Run dispatch and combine."""
    from weft.sim import scenarios

    return run_grid(arguments, scenarios.moe, [])


def run_train(arguments: argparse.Namespace) -> int:
    """Run training."""
    from weft.sim import scenarios

    return run_grid(arguments, scenarios.train, scenarios.algorithms(arguments))


def run_dlrm(arguments: argparse.Namespace) -> int:
    """Run a recommendation model, or reproduce what was published."""
    from weft.sim import scenarios

    if arguments.topology is None:
        if arguments.sweep or arguments.trace or arguments.plot:
            arguments.usage_error("--sweep, --trace and --plot need --topology")
        arguments.article = "dlrm"
        arguments.quick = False
        return run_article(arguments)
    if arguments.out is not None:
        arguments.usage_error("--out is for the published table, without --topology")
    return run_grid(arguments, scenarios.dlrm, [])


def run_query(arguments: argparse.Namespace) -> int:
    """Run queries."""
    from weft.sim import scenarios

    return run_grid(arguments, scenarios.query, [])


def run_file(arguments: argparse.Namespace) -> int:
    """Run a scenario from a file."""
    from weft.sim import scenarios

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
    """Run one scenario, or one for each point of a sweep; show and keep what came out."""
    from weft.errors import ConfigurationError, ShapeError, SimulationError, SizeError
    from weft.sim import plot, show
    from weft.sim.sweep import parse_axes, points, run_points

    try:
        axes = [*extra, *parse_axes(arguments.sweep, arguments.swept)]
        grid = points(axes, lambda at: spec_at(arguments, at))
        if arguments.plot is not None:
            plot.check_target(arguments.plot)
        if arguments.trace is not None and not arguments.trace.absolute().parent.is_dir():
            raise ValueError(f"there is no directory {arguments.trace.parent} for the trace")
        single = len(grid) == 1
        if not single and arguments.trace is not None:
            raise ValueError("a trace is of a single run, and this is a sweep")
        for point in grid:
            point.spec["links"] = MOST_LINKS if single and arguments.plot else LINKS_SHOWN
            timeline = arguments.plot is not None and arguments.picture == "timeline"
            if single and (arguments.trace is not None or timeline):
                point.spec["trace"] = MOST_SPANS
    except ValueError as error:
        arguments.usage_error(str(error))
    try:
        outcomes = run_points(grid, label="points", progress=not arguments.json)
    except (ConfigurationError, ShapeError, SizeError) as error:
        arguments.usage_error(str(error))
    except SimulationError as error:
        print(f"weft sim: {error}", file=sys.stderr)
        return 1
    scenario = grid[0].spec["scenario"]
    written = keep(arguments, scenario, axes, outcomes)
    found = show.as_json(scenario, grid, outcomes) | written
    if arguments.json:
        print(json.dumps(found))
    else:
        show.for_people(scenario, outcomes)
        for what, path in written.items():
            print(f"\n{what.capitalize():8}  {path}")
    return 0


def keep(
    arguments: argparse.Namespace,
    scenario: str,
    axes: Sequence[Any],
    outcomes: Sequence[dict[str, Any]],
) -> dict[str, str]:
    """Write the trace and the picture that were asked for; where they are."""
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


def run_article(arguments: argparse.Namespace) -> int:
    """Reproduce published figures."""
    import importlib

    from weft.sim import plot
    from weft.sim.article import finish

    article = importlib.import_module(f"weft.sim.{arguments.article}")
    if arguments.out is not None:
        try:
            # Where the results go is found out before the work, not after it.
            arguments.out.mkdir(parents=True, exist_ok=True)
            plot.check_target(arguments.out / "picture.svg")
        except (OSError, ValueError) as error:
            arguments.usage_error(f"--out: {error}")
    found = article.reproduce(
        seed=arguments.seed, quick=arguments.quick, progress=not arguments.json
    )
    if arguments.out is not None:
        finish(arguments.out, arguments.article, article.document(found), found)
        for name, figure in article.pictures(found):
            plot.save(figure, arguments.out / name)
    if arguments.json:
        print(json.dumps(found))
    else:
        for title, headers, rows in article.tables(found):
            print(f"{title}\n\n{format_table(headers, rows)}\n")
        for note in article.notes(found):
            print(note)
        if arguments.out is not None:
            print(f"\nTables, JSON and pictures  {arguments.out}")
    return 0
