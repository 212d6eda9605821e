"""Benchmark of collectives between the GPUs of one host: Weft beside NCCL and torch's operators.

Appends a record of each case to results/gpu_collectives.jsonl as it ends. Ranks are processes, one
for each GPU. A side that fails is recorded as failed in its case, and the other sides run; if it
ends the ranks, they are started anew without it. `--device twin` runs Weft's sides on the CPU, for
tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from collectives_cases import choose, small
from launching import Program, add_options, run_cases, show_failures
from serving import figure

from weft.bench.device.machine import missing
from weft.cli.table import format_table

RESULTS: Final = Path(__file__).parent.parent / "results" / "gpu_collectives.jsonl"
#: A failure of Weft is that of the case.
PROGRAM: Final = Program(
    "gpu-collectives",
    Path(__file__).parent / "collectives_rank.py",
    lambda case, side: "" if side == "weft" else side,
)


def main() -> int:
    """All cases; 1 if a result was wrong or a case failed."""
    arguments = parse()
    lacking = missing(arguments.device)
    if lacking is not None:
        print(f"collectives: {lacking}", file=sys.stderr)
        return 1
    records = run_cases(arguments, PROGRAM, RESULTS, seconds=arguments.seconds)
    if arguments.json:
        print(json.dumps({"cases": records}))
    else:
        show(records)
    return int(any(record["status"] in ("wrong", "failed") for record in records))


def parse() -> argparse.Namespace:
    """The options, with the cases as `chosen`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, RESULTS)
    parser.add_argument(
        "--cases",
        metavar="NAME,...",
        help="cases by name or first word, as `all_reduce 8M,barrier` (default: all but sweep)",
    )
    parser.add_argument("--sweep", action="store_true", help="short for --cases sweep")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.15,
        help="measuring time of a side in a case, within 20 to 200 replays (default %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.sweep and arguments.cases:
        parser.error("--sweep and --cases: expected one of both")
    if arguments.ranks is not None and arguments.ranks < 1:
        parser.error(f"--ranks {arguments.ranks}: expected 1 or more")
    for name in ("seconds", "budget"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name} {getattr(arguments, name)}: expected more than 0")
    try:
        arguments.chosen = choose("sweep" if arguments.sweep else arguments.cases)
    except ValueError as error:
        parser.error(str(error))
    if arguments.device == "twin":
        arguments.chosen = small(arguments.chosen)
        if not arguments.chosen:
            parser.error("--device twin: no case is short enough; expected sizes up to 64K")
    return arguments


def show(records: list[dict[str, Any]]) -> None:
    """Print records as tables."""
    about = next((each["origin"] for each in records if "device" in each["origin"]), None)
    if about is not None:
        gpus = ", ".join(sorted(set(about["gpus"]))) or "CPU twin: times are not representative"
        print(f"{about['ranks']} ranks ({gpus}); µs a call, median of the slowest rank\n")
    shown = [each for each in records if each["kind"] in ("collective", "barrier")]
    found = [each for each in shown if each["result"]]
    names = list(dict.fromkeys(name for each in found for name in each["result"]["sides"]))
    rows = [
        [
            each["case"],
            *(figure(each["result"]["sides"].get(name, {})) for name in names),
            each["result"]["best_peer"],
            each["result"]["of_best_peer"],
            each["result"]["sides"]["weft"].get("busbw_gb_per_s"),
        ]
        for each in found
    ]
    headers = ("case", *names, "best peer", "weft / best peer", "weft busbw GB/s")
    if rows:
        print(format_table(headers, rows) + "\n")
    for each in records:
        if each["kind"] not in ("collective", "barrier") and each["result"]:
            show_other(each)
    show_failures(records)


def show_other(record: dict[str, Any]) -> None:
    """Print a sweep, calls without a graph, or products beside."""
    rows = []
    for name, side in record["result"]["sides"].items():
        if side["status"] != "ok":
            continue
        row: dict[str, Any] = {"": name, "µs": side["time"]["slowest_p50_us"]}
        row["p99"] = side["time"]["slowest_p99_us"]
        for extra in ("host", "single"):
            if extra in side:
                row[extra] = side[extra]["slowest_p50_us"]
        for phase, time_of in side.get("phases", {}).items():
            row[phase] = time_of["slowest_p50_us"]
        rows.append(row)
    if rows:
        print(record["case"])
        print(format_table(list(rows[0]), [list(row.values()) for row in rows]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
