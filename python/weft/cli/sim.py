"""`weft sim`: how long things would take on a network, which nobody need own.

Here are its scenarios and what each takes; `sim_options` has the options that several take, and
`sim_run` runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.arguments import natural, positive
from weft.cli.sim_options import add_cluster, add_out, add_output, add_size, add_sweep, count
from weft.cli.sim_run import (
    run_allreduce,
    run_article,
    run_dlrm,
    run_file,
    run_moe,
    run_query,
    run_train,
)

if TYPE_CHECKING:
    from weft.cli.arguments import Subparsers


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
