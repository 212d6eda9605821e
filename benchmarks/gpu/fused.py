"""weft.fused operators between GPUs on one host, beside unfused ones.

Appends a record for each case to results/gpu_fused.jsonl as it ends. Beside the fused operator are
its own kernels without communication and torch's, each with the collectives from NCCL, Weft and
torch, and all parts separately. A side that fails is recorded as failed in that case, and the other
sides run; if it ends the ranks, they are started anew without it. `--device twin` runs tiny shapes
on the CPU under Triton's interpreter, for tests. `ablation` cases, which run if `--cases` names
them, have only the fused operator, with one tiling size at a time changed; `stores` cases have
several tilings with ordinary, paced and bulk stores, and Weft's parts separately. float8 GEMMs
beside `torch._scaled_mm`, kind `scaled`, run by name too.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from fused_cases import choose, tiny
from harness.cases import options, parse
from harness.records import figure
from harness.runner import Program, main, show_table

from weft.bench.device.machine import visible

if TYPE_CHECKING:
    import argparse

#: Limit for the compilation before the measurement; in seconds.
WARM_SECONDS: Final = 60.0


def parsed() -> argparse.Namespace:
    """The options, with the cases as `chosen`."""
    cases = (
        "cases by kind, name or first words, as `gemv,gemm_all_to_all mixtral` (default: all "
        "but `ablation`, `stores` and `scaled`)"
    )
    parser = options(__doc__, PROGRAM.results, cases)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.08,
        help="measuring time per side and case, within 8 to 200 replays (default %(default)s)",
    )
    parser.add_argument(
        "--no-warm",
        dest="warm",
        action="store_false",
        help="do not compile all operators' kernels at once before the measurement",
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, as on the twin")
    return parse(parser, lambda arguments: choose(arguments.cases), tiny)


def prepare(arguments: argparse.Namespace) -> None:
    """Compile the kernels, on GPUs, within the budget."""
    if arguments.device == "cuda" and arguments.warm:
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


def tables(records: list[dict[str, Any]]) -> None:
    """Print records as a table: the fused operator, the others, the parts, and what is hidden."""
    rows = [row(each["case"], each["result"]) for each in records if "ratios" not in each["result"]]
    headers = ("case", "fused", "p99", "own + nccl", "/ fused", "best unfused", "µs", "/ fused")
    parts = ("/ default", "own part", "other's", "exchange", "bound", "hidden %")
    show_table((*headers, *parts), rows)
    varied = [each for record in records for each in variations(record)]
    show_table(("case", "varied", "µs", "/ default", "hidden %"), varied)


def variations(record: dict[str, Any]) -> list[list[Any]]:
    """Rows for a varied case: the default, and each variation that has a time."""
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
    """Cells for a case."""
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


PROGRAM: Final = Program(
    "gpu-fused", "µs a call, median at the slowest rank", tables, interprets=True, prepare=prepare
)


if __name__ == "__main__":
    sys.exit(main(PROGRAM, parsed()))
