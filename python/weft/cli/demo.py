"""`weft demo`: train a small mixture-of-experts classifier and run it over processes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.errors import WeftError
from weft.base.output_files import check_folder, check_outputs
from weft.base.progress import Progress
from weft.cli.arguments import PROVIDERS, positive, ranks
from weft.cli.stored import Storing
from weft.cli.table import format_bars, format_table

if TYPE_CHECKING:
    import argparse

    from weft.cli.arguments import Subparsers
    from weft.demo.experiment import Findings

EPOCHS: Final = 20
SEED: Final = 7
PHASE_HEADERS: Final = (
    "phase",
    "p50 µs",
    "p99 µs",
    "slowest rank",
    "its p50 µs",
    "its p99 µs",
)


def add_parser(subparsers: Subparsers) -> None:
    """Declare `weft demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="demonstration: a small MoE classifier over several processes",
        description="Training of a mixture-of-experts classifier on scikit-learn's handwritten"
        " digits, classification of held-out images with its experts spread over processes, and a"
        " comparison with a single process. The exit status is 1 if the two differ.",
    )
    parser.add_argument(
        "--ranks",
        type=ranks,
        default=4,
        metavar="N",
        help="number of processes (default %(default)s)",
    )
    parser.add_argument(
        "--provider", choices=PROVIDERS, help="provider (default: the best available)"
    )
    parser.add_argument(
        "--passes",
        type=positive,
        default=10,
        metavar="N",
        help="passes over all held-out images (default %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("weft-demo"),
        metavar="DIR",
        help="directory for the trace and the timeline (default ./%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration; 0 if the processes agree with a single one."""
    missing = [name for name in ("sklearn", "matplotlib") if not importlib.util.find_spec(name)]
    if missing:
        print(
            f"weft demo: {' and '.join(missing)} cannot be found: pip install 'weft[demo]'",
            file=sys.stderr,
        )
        return 1

    from weft.bench.group import GroupError, check_provider
    from weft.demo import experiment, model

    try:
        check_provider(arguments.provider)
    except WeftError as error:
        print(f"weft demo: {error}", file=sys.stderr)
        return 1
    try:
        # Where the results go is found out before the work, not after it.
        check_folder("--output", arguments.output)
        check_outputs(experiment.pictures(arguments.output))
    except ValueError as error:
        arguments.usage_error(str(error))
    say = (lambda _: None) if arguments.json else print
    split = model.load_split(SEED)
    count = len(split.train_images)
    say(f"Training {model.EXPERTS} experts, {model.TOP_K} per image, on {count:,} images ...")
    with Progress("epochs", EPOCHS, enabled=not arguments.json) as progress:
        trained = model.train(split, EPOCHS, SEED, progress.advance)
    say(f"Spreading the experts over {arguments.ranks} processes ...\n")
    config = experiment.Config(
        arguments.ranks, arguments.provider, passes=arguments.passes, progress=not arguments.json
    )
    try:
        findings, events, clock_error_ns = experiment.run_over_ranks(config, trained, split)
    except GroupError as error:
        print(f"weft demo: {error}", file=sys.stderr)
        return error.status
    storing = Storing("weft demo")
    written: dict[str, Any] = {"trace": None, "timeline": None}
    storing.attempt(
        "--output",
        arguments.output,
        lambda: written.update(
            experiment.write_pictures(arguments.output, events, clock_error_ns, "weft demo")
        ),
    )
    if arguments.json:
        print(json.dumps(findings.to_json() | written))
    else:
        show(findings, written)
    return storing.status(0 if findings.agrees else 1)


def show(findings: Findings, written: dict[str, Any]) -> None:
    """Print the results as text."""
    from weft.bench.group import named_routes
    from weft.demo.experiment import TOLERANCE

    over = f" over {', '.join(findings.routes)}" if findings.routes else ""
    processes = f"{findings.ranks} processes{over}"
    if findings.provider_details:
        print(f"Routes: {named_routes(findings.routes, findings.provider_details)}\n")
    print(f"Test accuracy on {findings.images} images that training did not see")
    print(f"  {processes:24}{findings.accuracy:8.2%}")
    print(f"  {'a single process':24}{findings.single_process_accuracy:8.2%}")
    verdict = "within" if findings.agrees else "NOT within"
    print(
        f"  largest difference of logits {findings.largest_logit_difference:.1e}"
        f" ({verdict} {TOLERANCE:.0e})\n"
    )
    print(f"Images sent to each expert, in {findings.rounds} rounds")
    print(format_bars((f"expert {i}", load) for i, load in enumerate(findings.expert_load)) + "\n")
    print("Bytes of tokens and replies between processes")
    moved, naive = findings.bytes_moved, findings.naive_bytes
    share = f"  ({moved / naive:.0%})" if naive else ""
    print(f"  moved                   {moved:14,}{share}")
    print(f"  with a copy per expert  {naive:14,}")
    print(f"  written, with headers   {findings.bytes_written:14,}\n")
    print("Latency of each phase over all rounds")
    print(format_table(PHASE_HEADERS, findings.phases) + "\n")
    if written["trace"] is not None:
        print(f"Trace (open it at https://ui.perfetto.dev)  {written['trace']}")
        print(f"Timeline of the last rounds                 {written['timeline']}")
