"""Collectives benchmark between GPUs on one host: Weft beside NCCL and torch's operators.

Appends a record for each case to results/gpu_collectives.jsonl as it ends. Ranks are processes, one
for each GPU. A side that fails is recorded as failed in that case, and the other sides run; if it
ends the ranks, they are started anew without it. `--device twin` runs Weft's sides on the CPU, for
tests.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from collectives_cases import choose, small
from harness.cases import options, parse
from harness.records import figure
from harness.runner import Program, main, show_sides, show_table

if TYPE_CHECKING:
    import argparse

    from collectives_cases import Case


def parsed() -> argparse.Namespace:
    """The options, with the cases as `chosen`."""
    cases = "cases by name or first word, as `all_reduce 8M,barrier` (default: all but sweep)"
    parser = options(__doc__, PROGRAM.results, cases)
    parser.add_argument("--sweep", action="store_true", help="short for --cases sweep")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.15,
        help="measuring time per side and case, within 20 to 200 replays (default %(default)s)",
    )
    return parse(parser, selected, small)


def selected(arguments: argparse.Namespace) -> list[Case]:
    """Cases that the options name."""
    if arguments.sweep and arguments.cases:
        raise ValueError("--sweep and --cases: expected one of both")
    return choose("sweep" if arguments.sweep else arguments.cases)


def tables(records: list[dict[str, Any]]) -> None:
    """Print records as tables."""
    compared = [each for each in records if each["kind"] in ("collective", "barrier")]
    show_sides(compared, figure, **{"weft busbw GB/s": "busbw_gb_per_s"})
    for each in records:
        if each not in compared:
            show_other(each)


def show_other(record: dict[str, Any]) -> None:
    """Print a sweep, calls without a graph, or GEMMs beside."""
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
        show_table(list(rows[0]), [list(row.values()) for row in rows])


#: If Weft fails, the case has failed.
PROGRAM: Final = Program(
    "gpu-collectives",
    "µs a call, median at the slowest rank",
    tables,
    excludes=lambda case, side: "" if side == "weft" else side,
    shares_gpus=True,
)


if __name__ == "__main__":
    sys.exit(main(PROGRAM, parsed()))
