"""All GPU benchmarks on one host, the most important first, within a time limit.

Programs run one after another, each with a share of the remaining time; what one does not use goes
to the others. The records are appended to benchmarks/results/. A program that fails is named at the
end, and the others run. For example, `everything.py --budget 600` takes ten minutes. `--device
twin` runs short cases on the CPU, for tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from weft.bench.device.machine import missing, visible
from weft.cli.table import format_table

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).parents[2]
GPU: Final = ROOT / "benchmarks" / "gpu"
RESULTS: Final = ROOT / "benchmarks" / "results"
#: Beyond a program's share, before it is killed: cases that were begun end first. In seconds.
GRACE_SECONDS: Final = 60.0
#: With less time a program is skipped, since the ranks would not start in time. In seconds.
LEAST_SECONDS: Final = 15.0
#: Twin ranks, by default.
TWIN_RANKS: Final = 2


class Stage(NamedTuple):
    """A program with a share of the remaining time."""

    name: str
    share: float
    command: list[str]


def stages(device: str, ranks: int, directory: Path | None) -> list[Stage]:
    """Programs in order; records go to `directory`, or to benchmarks/results/."""
    to = directory or RESULTS
    of_device, of_ranks = ["--device", device], ["--ranks", str(ranks)]

    def own(program: str, *options: str) -> list[str]:
        return [sys.executable, str(GPU / f"{program}.py"), *of_device, *options]

    def results(name: str) -> list[str]:
        return ["--results", str(to / f"gpu_{name}.jsonl")]

    short = device == "twin"
    few = ["--cases", "all_reduce 1K"] if short else []
    gemvs = ["--cases", "gemv 8B o_proj 1"] if short else []
    steps = ["--cases", "decode 4096 1"] if short else []
    small = ["--sizes", "0.25", "--pieces", "0.125", "--calls", "2"] if short else []
    brief = ["--sizes", "1024", "--rounds", "1", "--seconds", "0.1"] if short else []
    nodes = [sys.executable, str(GPU / "queries.py"), "--device", "cpu" if short else "cuda:0"]
    moe = [sys.executable, "-m", "weft", "bench", "moe", *of_device, *of_ranks]
    found = [
        Stage("collectives", 0.35, own("collectives", *of_ranks, *few, *results("collectives"))),
        Stage("fused", 0.35, own("fused", *of_ranks, *gemvs, *results("fused"))),
        Stage(
            "fused models", 0.3, own("fused_models", *of_ranks, *steps, *results("fused_models"))
        ),
        Stage("training", 0.4, own("training", *of_ranks, *steps, *results("training"))),
        Stage(
            "moe",
            0.6,
            [*moe, "--cases", "decode" if short else "all", "--record", str(to / "gpu_moe.jsonl")],
        ),
        Stage(
            "several hosts",
            0.3,
            own("hierarchical", *of_ranks, *small, "--record", str(to / "gpu_hierarchical.jsonl")),
        ),
        Stage("queries", 0.2, [*nodes, *brief, "--record", str(to / "gpu_queries.jsonl")]),
        Stage(
            "ablation",
            0.4,
            own("fused", *of_ranks, "--cases", "ablation", *results("fused")),
        ),
        Stage("sweep", 1.0, own("collectives", *of_ranks, "--sweep", *results("collectives"))),
    ]
    # Two pretended hosts have equal rank counts; twin sweeps and ablations have no use.
    left_out = {"several hosts"} if ranks % 2 else set()
    left_out |= {"sweep", "ablation"} if short else set()
    return [each for each in found if each.name not in left_out]


def run(stage: Stage, seconds: float, quiet: bool) -> dict[str, Any]:
    """Run a program within a time limit; returns the status."""
    if seconds < LEAST_SECONDS:
        return {"program": stage.name, "status": "skipped", "seconds": 0.0}
    command = [*stage.command, "--budget", f"{seconds:.0f}"]
    began = time.monotonic()
    print(f"== {stage.name}, {seconds:.0f} s", file=sys.stderr, flush=True)
    try:
        code = subprocess.run(
            command,
            stdout=subprocess.DEVNULL if quiet else None,
            timeout=seconds + GRACE_SECONDS,
            check=False,
        ).returncode
        status = "ok" if code == 0 else f"failed with status {code}"
    except subprocess.TimeoutExpired:
        status = f"killed after {seconds + GRACE_SECONDS:.0f} s"
    took = round(time.monotonic() - began, 1)
    return {"program": stage.name, "status": status, "seconds": took}


def run_all(chosen: Sequence[Stage], budget: float, quiet: bool) -> list[dict[str, Any]]:
    """Run programs in order within a time."""
    deadline = time.monotonic() + budget
    outcomes = []
    for stage in chosen:
        left = deadline - time.monotonic()
        outcomes.append(run(stage, left * stage.share, quiet))
    return outcomes


def main() -> int:
    """All programs; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "twin"), default="cuda", help="default cuda")
    parser.add_argument("--ranks", type=int, help="ranks (default: one for each visible GPU)")
    parser.add_argument(
        "--budget", type=float, default=1800, metavar="SECONDS", help="time (default %(default)g)"
    )
    parser.add_argument("--directory", type=Path, help="record folder (default benchmarks/results)")
    parser.add_argument("--json", action="store_true", help="JSON output")
    arguments = parser.parse_args()
    lacking = missing(arguments.device)
    if lacking is not None:
        print(f"everything: {lacking}", file=sys.stderr)
        return 1
    ranks = arguments.ranks or (visible() if arguments.device == "cuda" else TWIN_RANKS)
    if ranks < 1 or not arguments.budget > 0:
        parser.error(f"--ranks {ranks}, --budget {arguments.budget}: expected more than 0")
    chosen = stages(arguments.device, ranks, arguments.directory)
    outcomes = run_all(chosen, arguments.budget, arguments.json)
    if arguments.json:
        print(json.dumps({"programs": outcomes}))
    else:
        rows = [[each["program"], each["status"], each["seconds"]] for each in outcomes]
        print(format_table(("program", "status", "seconds"), rows))
    return int(any(each["status"] not in ("ok", "skipped") for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
