"""Options for `weft qdl`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft.cli.arguments import byte_count, natural, positive
from weft.cli.bench import add_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.cli.arguments import Subparsers

SCENARIOS: Final = ("SingleStream", "MultiStream", "Server", "Offline")
MODELS: Final = ("noop", "checksum")
PROVIDERS: Final = ("shm", "verbs", "ofi", "tcp")
POLICIES: Final = ("round-robin", "least-in-flight", "latency-aware")


def amount(text: str) -> float:
    """Finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: expected more than 0")
    return value


def seconds(text: str) -> float:
    """Finite number, at least 0."""
    return 0.0 if text in {"0", "0.0"} else amount(text)


def add_accelerator(parts: Subparsers) -> argparse.ArgumentParser:
    """Declare `weft qdl accelerator`."""
    parser = parts.add_parser(
        "accelerator",
        help="accelerator node with a model for tests",
        description="Node that serves front-end queries until Ctrl-C or SIGTERM. Your own models "
        "are Python callables: weft.qdl.Accelerator.",
    )
    parser.add_argument(
        "--listen",
        default="localhost:0",
        metavar="ADDRESS",
        help="host:port; off loopback WEFT_SECRET is needed (default %(default)s: any free port)",
    )
    parser.add_argument("--name", default="", help="unique name (default: the address)")
    parser.add_argument(
        "--front-ends", type=positive, default=8, metavar="N", help="most front ends (default 8)"
    )
    parser.add_argument(
        "--window",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="time for which a batch waits",
    )
    parser.add_argument(
        "--max-batch",
        type=positive,
        default=64,
        metavar="N",
        help="queries per batch (default 64)",
    )
    add_model(parser, (*MODELS, "tokens"))
    parser.add_argument(
        "--tokens",
        type=positive,
        default=8,
        metavar="N",
        help="tokens per answer, for the model tokens (default %(default)s)",
    )
    add_connection(parser)
    add_placement(parser)
    parser.add_argument("--json", action="store_true", help="JSON output")
    return parser


def add_model(parser: argparse.ArgumentParser, models: Sequence[str] = MODELS) -> None:
    """Declare model and sizes."""
    parser.add_argument(
        "--model", choices=models, default="noop", help="model (default %(default)s)"
    )
    parser.add_argument(
        "--bytes", type=byte_count, required=True, metavar="N", help="bytes per query"
    )
    add_answer(parser)


def add_answer(parser: argparse.ArgumentParser) -> None:
    """Declare the answer and the time for it."""
    parser.add_argument(
        "--answer-bytes",
        type=byte_count,
        default=8,
        metavar="N",
        help="bytes per answer (default 8)",
    )
    parser.add_argument(
        "--work",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="the model's CPU time for each query (default 0)",
    )


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Declare what both connection ends have."""
    parser.add_argument(
        "--provider",
        choices=PROVIDERS,
        help="provider (default: shm or tcp, the better one that both ends have)",
    )
    parser.add_argument(
        "--slots",
        type=positive,
        default=1024,
        metavar="N",
        help="most queries in flight to a node (default %(default)s)",
    )
    parser.add_argument("--checksum", action="store_true", help="a checksum for every payload")
    parser.add_argument(
        "--spin",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="time without work in which a thread polls without a pause (default 0)",
    )


def numa(text: str) -> str:
    """A NUMA node, `auto` or `none`."""
    if text not in {"auto", "none"} and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a NUMA node, auto or none")
    return text


def add_placement(parser: argparse.ArgumentParser) -> None:
    """Declare thread and memory placement."""
    parser.add_argument(
        "--placement",
        type=numa,
        metavar="NODE",
        help="NUMA node for threads and slots, auto (the NIC's node) or none (default auto)",
    )


def add_frontend(parts: Subparsers) -> argparse.ArgumentParser:
    """Declare `weft qdl frontend`."""
    parser = parts.add_parser(
        "frontend",
        help="LoadGen test over accelerator nodes",
        description="One MLPerf LoadGen test, whose queries go to accelerator nodes. The exit"
        " status is 1 if the result is not valid or a query had no answer.",
    )
    add_test(parser)
    parser.add_argument(
        "--mode",
        choices=("performance", "accuracy", "submission"),
        default="performance",
        help="LoadGen mode (default %(default)s)",
    )
    parser.add_argument(
        "--audit-config",
        type=Path,
        default=Path("audit.config"),
        metavar="FILE",
        help="LoadGen's audit.config, which need not exist (default ./%(default)s)",
    )
    return parser


def add_audit(parts: Subparsers) -> argparse.ArgumentParser:
    """Declare `weft qdl audit`."""
    parser = parts.add_parser(
        "audit",
        help="MLPerf's audits TEST01 and TEST04",
        description="An audit's runs, each in a separate process, and its verdict. The exit"
        " status is 1 if it fails.",
    )
    parser.add_argument("audit", choices=("TEST01", "TEST04"), help="audit")
    add_test(parser)
    return parser


def add_test(parser: argparse.ArgumentParser) -> None:
    """Declare a test."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="ADDRESS[@SOURCE][,...]",
        help="node, with an address for each of its NICs; ADDRESS@SOURCE connects from an "
        "address on this host, ADDRESS@auto from all NICs that reach ADDRESS, only those on the "
        "--placement NUMA node if there are any (repeatable)",
    )
    where.add_argument(
        "--in-process", action="store_true", help="the model in this process, for comparison"
    )
    parser.add_argument("--scenario", choices=SCENARIOS, required=True, help="scenario of LoadGen")
    parser.add_argument(
        "--bytes", type=byte_count, required=True, metavar="N", help="bytes per sample"
    )
    parser.add_argument(
        "--samples", type=positive, default=1024, metavar="N", help="samples (default %(default)s)"
    )
    parser.add_argument(
        "--performance-samples", type=positive, metavar="N", help="samples in memory (default: all)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="samples one after another (default: made up)"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path("weft-qdl"),
        metavar="DIR",
        help="logs (default ./%(default)s)",
    )
    add_loadgen(parser)
    parser.add_argument(
        "--queries",
        type=positive,
        default=8192,
        metavar="N",
        help="most queries in flight together",
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[1],
        help="node selection policy (default %(default)s)",
    )
    parser.add_argument(
        "--max-slot-bytes",
        type=byte_count,
        default=1 << 30,
        metavar="N",
        help="most slot memory per connection, bytes (default %(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=amount,
        default=60.0,
        metavar="SECONDS",
        help="query deadline (default 60)",
    )
    parser.add_argument(
        "--kept-answers",
        type=natural,
        default=0,
        metavar="N",
        help="answers kept by sample, against the rules: a proof that TEST04 detects it",
    )
    parser.add_argument(
        "--local-model", choices=MODELS, default="noop", help="model of --in-process"
    )
    add_answer(parser)
    add_connection(parser)
    add_placement(parser)
    parser.add_argument("--json", action="store_true", help="JSON output")


def add_loadgen(parser: argparse.ArgumentParser) -> None:
    """Declare LoadGen settings."""
    parser.add_argument("--model-name", default="weft", help="model in configuration files")
    parser.add_argument(
        "--user-conf",
        type=Path,
        metavar="FILE",
        help="LoadGen's user.conf; with it LoadGen's own mlperf.conf applies",
    )
    for name, kind, metavar, what in (
        ("target-qps", amount, "RATE", "queries per second: the rate in Server, else an estimate"),
        ("target-latency", amount, "SECONDS", "latency limit in Server"),
        ("samples-per-query", positive, "N", "samples per query in MultiStream"),
        ("duration", amount, "SECONDS", "least duration"),
        ("max-duration", amount, "SECONDS", "most duration"),
        ("min-queries", positive, "N", "least queries"),
        ("max-queries", positive, "N", "most queries"),
    ):
        parser.add_argument(
            f"--{name}", type=kind, metavar=metavar, help=f"{what} (default: LoadGen's)"
        )
    parser.add_argument(
        "--coalesce", action="store_true", help="issue Server queries that are due together as one"
    )


def add_bench(parts: Subparsers) -> argparse.ArgumentParser:
    """Declare `weft qdl bench`."""
    parser = parts.add_parser(
        "bench",
        help="a front end and a node on this machine, beside LoadGen in one process",
        description="LoadGen with the model in its process, then over a connection to a node on "
        "this machine, each in a separate process; prints their ratio.",
    )
    add_model(parser)
    parser.add_argument(
        "--scenario", choices=SCENARIOS, default="Offline", help="scenario (default %(default)s)"
    )
    parser.add_argument(
        "--samples", type=positive, default=1024, metavar="N", help="samples (default %(default)s)"
    )
    parser.add_argument(
        "--duration",
        type=amount,
        default=3.0,
        metavar="SECONDS",
        help="least duration per test (default %(default)s)",
    )
    parser.add_argument(
        "--target-qps", type=amount, metavar="RATE", help="rate (default: by a short first test)"
    )
    parser.add_argument(
        "--target-latency",
        type=amount,
        default=0.015,
        metavar="SECONDS",
        help="latency limit in Server (default %(default)s)",
    )
    parser.add_argument(
        "--coalesce", action="store_true", help="issue Server queries that are due together as one"
    )
    parser.add_argument(
        "--max-batch",
        type=positive,
        default=64,
        metavar="N",
        help="queries per batch (default 64)",
    )
    add_connection(parser)
    add_output(parser, "qdl.jsonl")
    return parser
