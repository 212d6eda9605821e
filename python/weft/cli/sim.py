"""`weft sim`: how long things would take on a network, which nobody need own."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.cli.arguments import natural, positive
from weft.cli.table import format_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weft.cli.arguments import Subparsers

ROUTINGS: Final = ("unique", "static", "ecmp", "adaptive")
#: Links of the busiest that people are shown.
LINKS_SHOWN: Final = 8
#: Spans of a trace, and links of a heat map, that are enough for any picture.
MOST_SPANS: Final = 200_000
MOST_LINKS: Final = 100_000


def add_parser(subparsers: Subparsers) -> None:
    """Declare `weft sim` and its scenarios."""
    parser = subparsers.add_parser(
        "sim",
        help="simulate collectives, MoE, training and more on a network",
        description="Predict times on a network by a flow-level simulation: no such network is"
        " needed. A topology is a JSON file or a short form, such as"
        " bigraph:switches=16,endpoints=4,gbps=100,latency_us=0.5 or"
        " fat-tree:leaves=8,spines=8,hosts=8.",
    )
    scenarios = parser.add_subparsers(title="scenarios", metavar="SCENARIO", required=True)
    add_allreduce_parser(scenarios)
    add_moe_parser(scenarios)
    add_train_parser(scenarios)
    add_dlrm_parser(scenarios)
    add_query_parser(scenarios)
    add_file_parser(scenarios)
    add_article_parser(scenarios, "eflops", "the EFLOPS article (HPCA 2020): BiGraph, HDRM")
    add_article_parser(
        scenarios, "perplexity", "published MoE dispatch and combine on ConnectX-7 and EFA"
    )


def add_allreduce_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim allreduce`."""
    parser = scenarios.add_parser("allreduce", help="an all-reduce, or another collective")
    add_cluster(parser)
    parser.add_argument(
        "--algorithm",
        default="ring",
        metavar="NAME,...",
        help="ring, tree, hd, hdrm, direct, hierarchical, ...; several with commas"
        " (default %(default)s)",
    )
    parser.add_argument(
        "--collective",
        default="all-reduce",
        help="all-reduce, reduce-scatter, all-gather, broadcast or all-to-all"
        " (default %(default)s)",
    )
    add_size(parser, "--bytes", "1MiB", "length of the vector")
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="ranks (default: all of the network)"
    )
    parser.add_argument("--rounds", type=positive, default=1, metavar="N", help="repetitions")
    parser.add_argument("--local", type=positive, metavar="N", help="ranks of a node, hierarchical")
    parser.add_argument("--chunks", type=positive, metavar="N", help="pieces of a pipeline")
    add_sweep(parser, ("bytes", "ranks", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_allreduce, usage_error=parser.error)


def add_moe_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim moe`."""
    parser = scenarios.add_parser("moe", help="mixture-of-experts dispatch and combine")
    add_cluster(parser)
    numbers = (
        ("ranks", 16, "ranks"),
        ("tokens", 128, "tokens of each rank in each round"),
        ("hidden", 7168, "elements of a token"),
        ("experts", 256, "experts of all ranks together"),
        ("top-k", 8, "experts that a token names"),
        ("rounds", 4, "rounds, one after the other"),
        ("nics-per-rank", 1, "NICs of each rank"),
        ("ranks-per-nic", 1, "ranks that share a NIC"),
    )
    for name, default, what in numbers:
        parser.add_argument(
            f"--{name}",
            type=positive,
            default=default,
            metavar="N",
            help=f"{what} (default %(default)s)",
        )
    parser.add_argument(
        "--algorithm",
        choices=("rank", "expert"),
        default="rank",
        help="a copy of a token for each rank that owns any of its experts, or for each expert"
        " (default %(default)s)",
    )
    parser.add_argument(
        "--private-rows", type=natural, default=32, metavar="N", help="rows with the header"
    )
    parser.add_argument(
        "--nvlink",
        metavar="RANKS:GB/S[:US]",
        help="ranks of an NVLink domain, what each sends and receives a second, and its latency",
    )
    parser.add_argument(
        "--token-routing",
        default="uniform",
        metavar="uniform|zipf[:EXPONENT]|incast|FILE",
        help="which experts tokens name; FILE is an .npz or .safetensors file as of `weft bench"
        " moe` (default %(default)s)",
    )
    parser.add_argument("--dtype", default="float8_e4m3fn", help="of tokens (default %(default)s)")
    parser.add_argument(
        "--answer-dtype", default="bfloat16", help="of answers (default %(default)s)"
    )
    add_sweep(parser, ("ranks", "tokens", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_moe, usage_error=parser.error)


def add_train_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim train`."""
    parser = scenarios.add_parser(
        "train", help="training: compute, and gradients that are added up while it goes on"
    )
    add_cluster(parser)
    parser.add_argument("--algorithm", default="ring", metavar="NAME,...", help="of the all-reduce")
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="ranks (default: all of the network)"
    )
    parser.add_argument(
        "--model",
        default="resnet50",
        metavar="NAME|FILE",
        help="resnet50, million-class or bert, or a JSON file with layers (default %(default)s)",
    )
    add_size(parser, "--bytes", "25MiB", "gradients of a bucket")
    parser.add_argument(
        "--no-overlap", action="store_true", help="begin when the backward pass has ended"
    )
    parser.add_argument("--iterations", type=positive, default=3, metavar="N", help="iterations")
    add_sweep(parser, ("bytes", "ranks", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_train, usage_error=parser.error)


def add_dlrm_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim dlrm`."""
    parser = scenarios.add_parser(
        "dlrm",
        help="a recommendation model: embedding pooling, all-to-all, MLPs; fused or not",
        description="Without --topology, 128 nodes as docs/dlrm.md describes them, beside the"
        " published gain of fusing.",
    )
    add_cluster(parser, required=False)
    parser.add_argument(
        "--algorithm", choices=("both", "fused", "unfused"), default="both", help="which is run"
    )
    parser.add_argument("--ranks", type=count, metavar="N", help="nodes (default 128)")
    for name, what in (
        ("batch", "samples of each node"),
        ("tables", "tables of each node"),
        ("dimension", "elements of an embedding"),
        ("slices-per-peer", "slices of what goes to one peer"),
    ):
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    parser.add_argument(
        "--pooling", type=float, metavar="N", help="embeddings summed for each table"
    )
    parser.add_argument("--inference", action="store_true", help="the forward pass alone")
    add_out(parser)
    add_sweep(parser, ("ranks", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_dlrm, usage_error=parser.error)


def add_query_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim query`."""
    parser = scenarios.add_parser("query", help="queries from front ends to accelerators and back")
    add_cluster(parser)
    parser.add_argument("--front-ends", type=positive, default=1, metavar="N", help="front ends")
    parser.add_argument(
        "--accelerators", type=positive, default=1, metavar="N", help="accelerators"
    )
    parser.add_argument("--queries", type=positive, default=10_000, metavar="N", help="queries")
    parser.add_argument(
        "--arrivals", choices=("poisson", "uniform", "offline"), default="poisson", help="when"
    )
    parser.add_argument("--rate", type=float, metavar="N", help="queries a second, all together")
    add_size(parser, "--bytes", "147KiB", "bytes of a query")
    add_size(parser, "--answer-bytes", "4KiB", "bytes of an answer")
    parser.add_argument(
        "--service-us", type=float, default=100.0, metavar="US", help="service time of a query"
    )
    parser.add_argument("--slots", type=positive, default=64, metavar="N", help="of a connection")
    parser.add_argument(
        "--algorithm",
        choices=("round-robin", "least-loaded", "random"),
        default="round-robin",
        help="who answers (default %(default)s)",
    )
    add_sweep(parser, ("bytes", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_query, usage_error=parser.error)


def add_file_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim run`."""
    parser = scenarios.add_parser(
        "run", help="a scenario from a JSON file: mixtures of jobs, faults, stragglers, anything"
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the scenario; - is standard input")
    add_output(parser)
    parser.set_defaults(run=run_file, usage_error=parser.error)


def add_article_parser(scenarios: Subparsers, name: str, what: str) -> None:
    """Declare a command that reproduces what was published."""
    parser = scenarios.add_parser(name, help=f"reproduce {what}")
    parser.add_argument("--seed", type=natural, default=1, metavar="S", help="of all chance")
    parser.add_argument("--quick", action="store_true", help="a part of it, to see that it works")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_out(parser)
    parser.set_defaults(run=run_article, article=name, usage_error=parser.error)


def add_cluster(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare what the network is and what is wrong with it."""
    parser.add_argument("--topology", required=required, metavar="SPEC", help="the network")
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        help="how routes are chosen (default: static)",
        default="static",
    )
    parser.add_argument("--seed", type=natural, default=0, metavar="S", help="of all chance")
    parser.add_argument(
        "--preset", default="ideal", help="constants to start from: ideal or eflops"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value for a constant, such as post_s=1e-6; may be repeated",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FROM,TO,SHARE",
        help="the link between two nodes keeps this share of its bandwidth, 0 if it has failed",
    )
    parser.add_argument(
        "--straggler",
        action="append",
        default=[],
        metavar="RANK,SLOW[,LATE_US]",
        help="a rank takes so many times as long, and starts so much later",
    )


def add_size(parser: argparse.ArgumentParser, option: str, default: str, what: str) -> None:
    """Declare a size."""
    parser.add_argument(
        option, type=size, default=default, metavar="SIZE", help=f"{what} (default %(default)s)"
    )


def add_sweep(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Declare what may be swept."""
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help=f"run for each of several values of {', '.join(names)}: 16,32,64, or 1KiB..256MiB in"
        " steps of a factor of 2, or 1KiB..256MiB:x4; may be repeated",
    )
    parser.set_defaults(swept=names)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declare how results are shown."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw a .png or .svg: of a sweep time against what is swept, of a single run what"
        " --picture says",
    )
    parser.add_argument(
        "--picture",
        choices=("links", "timeline"),
        default="links",
        help="of a single run: a heat map of link loads, or when each rank did what (default"
        " %(default)s)",
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """Declare where tables and pictures go."""
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write tables, JSON and pictures to a directory"
    )


def size(text: str) -> int:
    """A size with a unit."""
    from weft.sim.units import parse_size

    return checked(parse_size, text)


def count(text: str) -> int:
    """A number of ranks."""
    from weft.sim.units import parse_count

    return checked(parse_count, text)


def checked(parse: Callable[[str], int], text: str) -> int:
    """What `parse` makes of it; argparse shows the message only of its own errors."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
