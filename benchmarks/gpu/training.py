"""Benchmark of training and decoding on the GPUs of one host: Weft beside NCCL.

Steps of DistributedDataParallel and FSDP2, and of tensor-parallel layers in CUDA graphs, also by
torch's one-shot all-reduce. Appends a record of each case to results/gpu_training.jsonl as it ends.
Sides take turns in one run, with equal weights and batches, and their losses or outputs are
compared. A side that fails is recorded as failed in its case, and the others run. `--device twin`
runs tiny shapes on the CPU, with gloo beside Weft, for tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from collectives_cases import named
from launching import Program, add_options, run_cases, show_failures
from training_cases import CASES, tiny

from weft.bench.device.machine import missing, visible
from weft.cli.table import format_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RESULTS: Final = Path(__file__).parent.parent / "results" / "gpu_training.jsonl"
#: A side that ends the ranks is left out of that case.
PROGRAM: Final = Program(
    "gpu-training",
    Path(__file__).parent / "training_rank.py",
    lambda case, side: f"{case}: {side}" if side else "",
)


def main() -> int:
    """All cases; 1 if a result was wrong or a case failed."""
    return run(parse(__doc__, RESULTS, CASES, tiny), PROGRAM, RESULTS)


def run(arguments: argparse.Namespace, program: Program, results: Path) -> int:
    """Run the cases of a benchmark of steps, and print them; the status of its program."""
    lacking = missing(arguments.device)
    if lacking is None and arguments.device == "cuda" and (arguments.ranks or 1) > visible():
        lacking = f"--ranks {arguments.ranks}: expected at most {visible()}, the visible GPUs"
    if lacking is not None:
        print(f"{program.name.removeprefix('gpu-')}: {lacking}", file=sys.stderr)
        return 1
    records = run_cases(arguments, program, results)
    if arguments.json:
        print(json.dumps({"cases": records}))
    else:
        show(records)
    return int(any(record["status"] in ("wrong", "failed") for record in records))


def parse(
    description: str, results: Path, cases: Sequence[Any], shrink: Callable[[list[Any]], list[Any]]
) -> argparse.Namespace:
    """The options, with the cases as `chosen`.

    Args:
        description: docstring of the program.
        results: default file of records.
        cases: all of them.
        shrink: small ones instead of some cases.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add_options(parser, results)
    example = ",".join(dict.fromkeys(case.name.split(" ")[0] for case in cases[:4]))
    parser.add_argument(
        "--cases",
        metavar="NAME,...",
        help=f"cases by name or first words, as `{example}` (default: all)",
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, as on the twin")
    arguments = parser.parse_args()
    if arguments.ranks is not None and arguments.ranks < 1:
        parser.error(f"--ranks {arguments.ranks}: expected 1 or more")
    if not arguments.budget > 0:
        parser.error(f"--budget {arguments.budget}: expected more than 0")
    try:
        arguments.chosen = list(cases) if arguments.cases is None else named(arguments.cases, cases)
    except ValueError as error:
        parser.error(str(error))
    if arguments.tiny or arguments.device == "twin":
        arguments.chosen = shrink(arguments.chosen)
    return arguments


def show(records: list[dict[str, Any]]) -> None:
    """Print records as a table."""
    about = next((each["origin"] for each in records if "device" in each["origin"]), None)
    if about is not None:
        gpus = ", ".join(sorted(set(about["gpus"]))) or "CPU twin: times are not representative"
        print(f"{about['ranks']} ranks ({gpus}); ms a step, median / p99 of the slowest rank\n")
    found = [each for each in records if each["result"]]
    names = list(dict.fromkeys(name for each in found for name in each["result"]["sides"]))
    rows = [
        [
            each["case"],
            *(cell(each["result"]["sides"].get(name, {})) for name in names),
            each["result"]["best_peer"],
            each["result"]["of_best_peer"],
        ]
        for each in found
    ]
    if rows:
        print(format_table(("case", *names, "best peer", "weft / best peer"), rows) + "\n")
    show_failures(records)


def cell(side: dict[str, Any]) -> str | None:
    """Median and p99 of a side in milliseconds, or its status."""
    if side.get("status") != "ok":
        return side.get("status")
    time = side["time"]
    return f"{time['slowest_p50_us'] / 1000:.3f} / {time['slowest_p99_us'] / 1000:.3f}"


if __name__ == "__main__":
    sys.exit(main())
