"""`weft qdl`: inference queries over a network, with MLPerf's LoadGen."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from weft.base import threads
from weft.base.errors import WeftError
from weft.base.output_files import check_folder, write_output
from weft.cli import qdl_options, qdl_values
from weft.cli.bench import check_record, finish
from weft.cli.interrupts import Interrupted, ends_soon
from weft.cli.qdl_view import LiveView
from weft.cli.stored import Storing
from weft.cli.table import format_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from weft.cli.arguments import Subparsers
    from weft.qdl import Outcome

#: Seconds between two looks at a node's counts.
REFRESH_SECONDS: Final = 0.2
#: Time for a node to answer the queries that have arrived, and to end.
DRAIN_SECONDS: Final = 4.0


def add_parser(subparsers: Subparsers) -> None:
    """Declare `weft qdl` and subcommands."""
    parser = subparsers.add_parser(
        "qdl", help="query dispatch: accelerator nodes, MLPerf's LoadGen, audits, a benchmark"
    )
    parts = parser.add_subparsers(title="parts", metavar="PART", required=True)
    for declare, run in (
        (qdl_options.add_accelerator, run_accelerator),
        (qdl_options.add_frontend, run_frontend),
        (qdl_options.add_bench, run_bench),
        (qdl_options.add_audit, run_audit),
    ):
        part = declare(parts)
        part.set_defaults(run=reporting(part.prog, run), usage_error=part.error)


def reporting(
    name: str, run: Callable[[argparse.Namespace], int]
) -> Callable[[argparse.Namespace], int]:
    """A command whose errors become a line on standard error, and status 1."""

    def run_and_report(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except WeftError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1

    return run_and_report


def run_accelerator(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from weft import _native
    from weft.base.environment import check_variables
    from weft.qdl.placement import here, place

    check_variables()
    spec = qdl_values.node_spec(arguments)
    placement = place(qdl_values.placement_of(arguments), addresses=[arguments.listen])
    if placement is not None:
        spec["numa_node"] = placement.numa_node
    with here(placement):
        node = _native.QdlNode(json.dumps(spec), None)
    # A handler takes no lock: it may run in this thread while that holds one.
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            with here(placement):
                node.serve()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, name="weft-node", daemon=True)
    threads.start(thread)
    if arguments.json:
        print(json.dumps({"address": node.address, "name": node.name}), flush=True)
    else:
        print(f"Node {node.name} listens at {node.address}; Ctrl-C ends it.", flush=True)
    with LiveView("front ends", enabled=not arguments.json) as view:
        while not signals and thread.is_alive():
            thread.join(REFRESH_SECONDS)
            view.show(*node.counts())
    node.stop()
    if signals:
        # A model may never return.
        ends_soon(signals[0], after=DRAIN_SECONDS)
    thread.join()
    if failures:
        raise failures[0]
    issued, answered, failed, _ = node.counts()
    if arguments.json:
        counts = {"arrived": issued, "answered": answered, "failed": failed}
        departures = [
            {"name": name, "cause": cause, "lost": lost} for name, cause, lost in node.departures()
        ]
        print(json.dumps(counts | {"departures": departures}))
    else:
        print(f"{issued:,} queries, {answered:,} answered, {failed:,} failed")
        for _, cause, _ in node.departures():
            print(f"front end lost: {cause}")
    return 0


def run_frontend(arguments: argparse.Namespace) -> int:
    """Run a test; 1 if it is not valid, or a query had no answer."""
    qdl_values.check_placement(arguments)
    check_logs(arguments)
    test = qdl_values.test_of(arguments)
    view = LiveView("nodes", enabled=not arguments.json)
    try:
        with view:
            outcome = test.run(lambda counts: view.show(*counts))
    except Interrupted as error:
        # LoadGen cannot end a test early, and the threads would still run at interpreter exit.
        print(f"weft qdl frontend: {error}; the logs are incomplete", file=sys.stderr)
        sys.stderr.flush()
        os._exit(error.status)
    if arguments.json:
        print(json.dumps(outcome.to_json()))
    else:
        show(outcome)
    return 1 if outcome.counts.failed or outcome.valid is False else 0


def check_logs(arguments: argparse.Namespace) -> None:
    """Reject a `--logs` folder that cannot be written."""
    try:
        check_folder("--logs", arguments.logs)
    except ValueError as error:
        arguments.usage_error(str(error))


def show(outcome: Outcome) -> None:
    """Print an outcome as text."""
    verdict = {True: "VALID", False: "INVALID", None: "accuracy alone"}[outcome.valid]
    print(f"{outcome.sut_name or 'no summary'}: {outcome.scenario}, {verdict}\n")
    rows = [
        ("samples/s", outcome.samples_per_second),
        ("latency p99, µs", outcome.latency_p99 and outcome.latency_p99 * 1e6),
        ("queries", outcome.counts.issued),
        ("queries without an answer", outcome.counts.failed),
        *bandwidth_rows(outcome.to_json()),
    ]
    print(format_table(("figure", "value"), [row for row in rows if row[1] is not None]))
    for departure in outcome.departures:
        how = "lost" if departure.lost else "left"
        print(f"\nnode {departure.name} {how}: {departure.cause}")
    for key in ("Min duration satisfied", "Min queries satisfied", "Early stopping satisfied"):
        if outcome.summary.get(key, "Yes").upper() == "NO":
            print(f"\n{key}: NO")
    print(f"\nLoadGen {outcome.loadgen}; logs in {outcome.log_directory}")


def bandwidth_rows(outcome: dict[str, Any]) -> list[tuple[str, float | None]]:
    """Byte rates by the rules' formula, and the link rate."""
    names = (("ingress", "ingress"), ("egress", "egress"), ("link", "link"))
    rates = [(label, outcome[f"{name}_bytes_per_second"]) for label, name in names]
    return [(f"{label}, GB/s", None if rate is None else rate / 1e9) for label, rate in rates]


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure both ways; 1 if a result is not valid."""
    from weft.qdl import bench

    check_record(arguments)
    workload = qdl_values.workload_of(arguments)
    say = (lambda _: None) if arguments.json else (lambda step: print(f"Measuring {step} ..."))
    found = bench.measure(workload, say)
    storing = Storing("weft qdl bench")
    finish(arguments, found, show_bench, storing)
    valid = all(found[way]["valid"] for way in ("in_process", "network"))
    return storing.status(0 if valid else 1)


def show_bench(found: dict[str, Any]) -> None:
    """Print a measurement as text."""
    workload = found["workload"]
    print(f"\n{workload['scenario']}, {workload['model']}, {workload['sample_bytes']:,} B\n")
    rows = [
        (
            name,
            outcome["samples_per_second"],
            outcome["latency_p99"] * 1e6,
            *(rate for _, rate in bandwidth_rows(outcome)),
            "yes" if outcome["valid"] else "no",
        )
        for name, outcome in (
            ("in process", found["in_process"]),
            (f"over {workload['provider']}", found["network"]),
        )
    ]
    headers = ("way", "samples/s", "p99 µs", "ingress GB/s", "egress GB/s", "link GB/s")
    print(format_table((*headers, "valid"), rows))
    print(f"\nratio {found['ratio']:.3f}")
    if found["network"]["link_bytes_per_second"] is None:
        print("Both nodes are on this machine: there is no link whose rate would be a limit.")


def run_audit(arguments: argparse.Namespace) -> int:
    """Run an audit; 1 if it does not pass."""
    from weft.qdl import audits, bench

    qdl_values.check_placement(arguments)
    check_logs(arguments)
    options = qdl_values.forwarded(arguments)
    logs: Path = arguments.logs
    performance, audited = logs / "performance", logs / arguments.audit
    say = (lambda _: None) if arguments.json else print
    say("Performance run ...")
    bench.run_test(options, performance)
    audited.mkdir(parents=True, exist_ok=True)
    config = audits.configuration(arguments.audit)
    write_output(audited / "audit.config", config)
    say(f"{arguments.audit} ...")
    bench.run_test(options, audited)
    verdicts = [audits.compare_rates(arguments.audit, performance, audited)]
    if arguments.audit == "TEST01":
        say("Accuracy run ...")
        bench.run_test([*options, "--mode", "accuracy"], logs / "accuracy")
        verdicts.append(audits.compare_answers(logs / "accuracy", audited))
    passed = all(verdict.passed for verdict in verdicts)
    if arguments.json:
        details = [verdict.detail for verdict in verdicts]
        print(json.dumps({"audit": arguments.audit, "passed": passed, "details": details}))
    else:
        for verdict in verdicts:
            print(f"{'pass' if verdict.passed else 'FAIL'}  {verdict.detail}")
        print(f"{arguments.audit}: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1
