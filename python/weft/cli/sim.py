"""`weft sim`: predicted times for collectives, MoE, training and queries on a described network.

Declares the scenarios and their options. `sim_options` has the shared options, `sim_scenarios`
builds the scenarios as JSON, `sim_run` runs them, `sim_tables` shows the outcomes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.arguments import natural, positive
from weft.cli.sim_options import add_cluster, add_output, add_size, add_sweep, count
from weft.cli.sim_run import (
    run_allreduce,
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
        help="simulation of collectives, MoE, training and more on a network",
        description="Predict times on a described network by flow-level simulation."
        " A topology is a JSON file or a short form, such as"
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


def add_allreduce_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim allreduce`."""
    parser = scenarios.add_parser("allreduce", help="all-reduce, or another collective")
    add_cluster(parser)
    parser.add_argument(
        "--algorithm",
        default="ring",
        metavar="NAME,...",
        help="collective algorithm: ring, tree, hd, hdrm, direct, hierarchical, ...; several with"
        " commas (default %(default)s)",
    )
    parser.add_argument(
        "--collective",
        default="all-reduce",
        help="collective: all-reduce, reduce-scatter, all-gather, broadcast or all-to-all"
        " (default %(default)s)",
    )
    add_size(parser, "--bytes", "1MiB", "vector length")
    parser.add_argument("--ranks", type=count, metavar="N", help="ranks (default: all endpoints)")
    parser.add_argument(
        "--rounds", type=positive, default=1, metavar="N", help="rounds, one after the other"
    )
    parser.add_argument(
        "--local", type=positive, metavar="N", help="ranks per node, for hierarchical"
    )
    parser.add_argument("--chunks", type=positive, metavar="N", help="pipeline chunks")
    add_sweep(parser, ("bytes", "ranks", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_allreduce, usage_error=parser.error)


def add_moe_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim moe`."""
    parser = scenarios.add_parser("moe", help="mixture-of-experts dispatch and combine")
    add_cluster(parser)
    numbers = (
        ("ranks", 16, "ranks"),
        ("tokens", 128, "tokens per rank and round"),
        ("hidden", 7168, "hidden size, in elements"),
        ("experts", 256, "total experts"),
        ("top-k", 8, "experts per token"),
        ("rounds", 4, "rounds, one after the other"),
        ("nics-per-rank", 1, "NICs per rank"),
        ("ranks-per-nic", 1, "ranks per NIC"),
    )
    for name, default, what in numbers:
        parser.add_argument(
            f"--{name}",
            type=count if name == "ranks" else positive,
            default=default,
            metavar="N",
            help=f"{what} (default %(default)s)",
        )
    parser.add_argument(
        "--copies",
        choices=("rank", "expert"),
        default="rank",
        help="token copies: one for each rank with any of its experts, or one for each expert"
        " (default %(default)s)",
    )
    parser.add_argument(
        "--private-rows",
        type=natural,
        default=32,
        metavar="N",
        help="rows per peer sent before the counts are known (default %(default)s)",
    )
    parser.add_argument(
        "--nvlink",
        metavar="RANKS:GB/S[:US]",
        help="NVLink domain: ranks, bandwidth per rank and direction, latency",
    )
    parser.add_argument(
        "--token-routing",
        default="uniform",
        metavar="uniform|zipf[:EXPONENT]|incast|FILE",
        help="expert choice by tokens; FILE is a routing trace, .npz or .safetensors, as for `weft"
        " bench moe` (default %(default)s)",
    )
    parser.add_argument(
        "--dtype", default="float8_e4m3fn", help="token dtype (default %(default)s)"
    )
    parser.add_argument(
        "--answer-dtype", default="bfloat16", help="combine row dtype (default %(default)s)"
    )
    add_sweep(parser, ("ranks", "tokens", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_moe, usage_error=parser.error)


def add_train_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim train`."""
    parser = scenarios.add_parser(
        "train", help="training iterations: compute overlapped with gradient all-reduces"
    )
    add_cluster(parser)
    parser.add_argument(
        "--algorithm",
        default="ring",
        metavar="NAME,...",
        help="all-reduce algorithm; several with commas (default %(default)s)",
    )
    parser.add_argument("--ranks", type=count, metavar="N", help="ranks (default: all endpoints)")
    parser.add_argument(
        "--model",
        default="resnet50",
        metavar="NAME|FILE",
        help="model: resnet50, bert, or a JSON file with layers (default %(default)s)",
    )
    add_size(parser, "--bytes", "25MiB", "gradient bucket size")
    parser.add_argument(
        "--no-overlap", action="store_true", help="all-reduces after the backward pass"
    )
    parser.add_argument("--iterations", type=positive, default=3, metavar="N", help="iterations")
    add_sweep(parser, ("bytes", "ranks", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_train, usage_error=parser.error)


def add_dlrm_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim dlrm`."""
    parser = scenarios.add_parser(
        "dlrm",
        help="recommendation model: embedding pooling, all-to-all, MLPs; fused and unfused",
    )
    add_cluster(parser)
    parser.add_argument(
        "--variant",
        choices=("both", "fused", "unfused"),
        default="both",
        help="all-to-all fused with pooling, after it, or both runs (default %(default)s)",
    )
    parser.add_argument("--ranks", type=count, metavar="N", help="nodes (default 128)")
    for name, what in (
        ("batch", "samples per node"),
        ("tables", "embedding tables per node"),
        ("dimension", "elements per embedding"),
        ("slices-per-peer", "slices per peer"),
    ):
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    parser.add_argument(
        "--pooling", type=float, metavar="N", help="embeddings summed per sample and table"
    )
    parser.add_argument("--inference", action="store_true", help="forward pass only")
    add_sweep(parser, ("ranks", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_dlrm, usage_error=parser.error)


def add_query_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim query`."""
    parser = scenarios.add_parser(
        "query", help="queries from front ends to accelerators, and responses"
    )
    add_cluster(parser)
    parser.add_argument("--front-ends", type=positive, default=1, metavar="N", help="front ends")
    parser.add_argument(
        "--accelerators", type=positive, default=1, metavar="N", help="accelerators"
    )
    parser.add_argument("--queries", type=positive, default=10_000, metavar="N", help="queries")
    parser.add_argument(
        "--arrivals",
        choices=("poisson", "uniform", "offline"),
        default="poisson",
        help="arrival process; offline is all at the start (default %(default)s)",
    )
    parser.add_argument(
        "--rate", type=float, metavar="N", help="total queries per second from all front ends"
    )
    add_size(parser, "--bytes", "147KiB", "query size")
    add_size(parser, "--answer-bytes", "4KiB", "response size")
    parser.add_argument(
        "--service-us", type=float, default=100.0, metavar="US", help="service time per query"
    )
    parser.add_argument(
        "--slots", type=positive, default=64, metavar="N", help="queries in flight per connection"
    )
    parser.add_argument(
        "--policy",
        choices=("round-robin", "least-loaded", "random"),
        default="round-robin",
        help="accelerator selection policy (default %(default)s)",
    )
    add_sweep(parser, ("bytes", "seed"))
    add_output(parser)
    parser.set_defaults(run=run_query, usage_error=parser.error)


def add_file_parser(scenarios: Subparsers) -> None:
    """Declare `weft sim run`."""
    parser = scenarios.add_parser(
        "run", help="scenario from a JSON file: any of these, mixtures, faults, stragglers"
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="scenario; - is standard input")
    add_output(parser)
    parser.set_defaults(run=run_file, usage_error=parser.error)
