"""Benchmark of the operators of weft.fused between the GPUs of one host, beside unfused ones.

Appends a record of each case to results/gpu_fused.jsonl as it ends. Beside the fused operator are
its own kernels without communication and torch's, each with the collectives of NCCL, Weft and
torch, and all parts alone. A side that fails is recorded as failed in its case, and the other sides
run; if it ends the ranks, they are started anew without it. `--device twin` runs tiny shapes on the
CPU under Triton's interpreter, for tests. Cases of the kind `ablation`, which run if `--cases`
names them, have the fused operator alone, with one size of its tiling at a time changed; those of
the kind `stores` have several tilings of ordinary, paced and bulk stores, and Weft's parts alone.
Products of float8 beside `torch._scaled_mm`, of the kind `scaled`, run by name too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from fused_cases import choose, tiny
from launching import Program, add_options, run_cases, show_failures
from serving import figure

from weft.bench.device.machine import missing, visible
from weft.cli.table import format_table

RESULTS: Final = Path(__file__).parent.parent / "results" / "gpu_fused.jsonl"
#: Limit of the compilation before the measurement; in seconds.
WARM_SECONDS: Final = 60.0
#: A side that ends the ranks is left out of that case.
PROGRAM: Final = Program(
    "gpu-fused",
    Path(__file__).parent / "fused_rank.py",
    lambda case, side: f"{case}: {side}" if side else "",
)


def main() -> int:
    """All cases; 1 if a result was wrong or a case failed."""
    arguments = parse()
    lacking = missing(arguments.device)
    if lacking is None and arguments.device == "cuda" and (arguments.ranks or 1) > visible():
        lacking = f"--ranks {arguments.ranks}: expected at most {visible()}, the visible GPUs"
    if lacking is not None:
        print(f"fused: {lacking}", file=sys.stderr)
        return 1
    if arguments.device == "twin":
        os.environ["TRITON_INTERPRET"] = "1"
    elif arguments.warm:
        began = time.monotonic()
        ranks = arguments.ranks or visible()
        limit = min(WARM_SECONDS, arguments.budget / 3)
        # It imports torch and Triton, which takes seconds.
        warm: Any = import_module("fused_warm").warm
        failed = warm(arguments.chosen, ranks, arguments.budget, limit)
        took = time.monotonic() - began
        arguments.budget = max(1.0, arguments.budget - took)
        unfinished = f"; unfinished: {', '.join(failed)}" if failed else ""
        print(f"kernels compiled in {took:.0f} s{unfinished}", file=sys.stderr, flush=True)
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
        help="cases by kind, name or first words, as `gemv,gemm_all_to_all mixtral` (default: all "
        "but `ablation`, `stores` and `scaled`)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.08,
        help="measuring time of a side in a case, within 8 to 200 replays (default %(default)s)",
    )
    parser.add_argument(
        "--no-warm",
        dest="warm",
        action="store_false",
        help="no compilation of kernels of all operators at once before the measurement",
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, as on the twin")
    arguments = parser.parse_args()
    if arguments.ranks is not None and arguments.ranks < 1:
        parser.error(f"--ranks {arguments.ranks}: expected 1 or more")
    for name in ("seconds", "budget"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name} {getattr(arguments, name)}: expected more than 0")
    try:
        arguments.chosen = choose(arguments.cases)
    except ValueError as error:
        parser.error(str(error))
    if arguments.tiny or arguments.device == "twin":
        arguments.chosen = tiny(arguments.chosen)
    return arguments


def show(records: list[dict[str, Any]]) -> None:
    """Print records as a table: the fused operator, the others, the parts, and what is hidden."""
    about = next((each["origin"] for each in records if "device" in each["origin"]), None)
    if about is not None:
        gpus = ", ".join(sorted(set(about["gpus"]))) or "CPU twin: times are not representative"
        print(f"{about['ranks']} ranks ({gpus}); µs a call, median of the slowest rank\n")
    found = [each for each in records if each["result"]]
    rows = [row(each["case"], each["result"]) for each in found if "ratios" not in each["result"]]
    headers = ("case", "fused", "p99", "own + nccl", "/ fused", "best unfused", "µs", "/ fused")
    parts = ("/ default", "own part", "other's", "exchange", "bound", "hidden %")
    if rows:
        print(format_table((*headers, *parts), rows) + "\n")
    varied = [each for found_case in found for each in variations(found_case)]
    if varied:
        print(format_table(("case", "varied", "µs", "/ default", "hidden %"), varied) + "\n")
    show_failures(records)


def variations(record: dict[str, Any]) -> list[list[Any]]:
    """Rows of a varied case: the default, and each variation that has a time."""
    result = record["result"]
    ratios = result.get("ratios")
    if ratios is None:
        return []
    parts = result["computation_us"], result["exchange_us"]
    made = []
    for name, ratio in {"fused": 1.0, **ratios}.items():
        side = result["sides"][name]
        if us := figure(side):
            hidden = None
            if all(parts) and side["is_whole"]:
                hidden = 100 * (sum(parts) - us) / min(parts)
            made.append([record["case"], name, us, ratio, hidden])
    return made


def row(case: str, result: dict[str, Any]) -> list[Any]:
    """Cells of a case."""
    sides = result["sides"]
    times = {name: figure(side) for name, side in sides.items()}
    fused = sides[result["fused"] or "fused"]
    p99 = fused["time"]["slowest_p99_us"] if "time" in fused else None
    # Weft's computation comes first, if it has one.
    own = next((us for name, us in times.items() if name.endswith("+ nccl") and us), None)
    best, hidden = result["best_unfused"], result["hidden"]
    parts = {
        name.split(" ")[0] == "weft": us
        for name, us in times.items()
        if " + " not in name and name.split(" ")[-1] in ("pool", "gemv", "gemm", "norm")
    }
    return [
        case,
        figure(fused) or fused["status"],
        p99,
        own,
        result["speedup_nccl"],
        best,
        times[best] if best else None,
        result["speedup"],
        result.get("speedup_default"),
        parts.get(True),
        parts.get(False),
        result["exchange_us"],
        result["bound_us"],
        None if hidden is None else 100 * hidden,
    ]


if __name__ == "__main__":
    sys.exit(main())
