"""MoE dispatch and combine over 4 processes, and gloo. Appends to results/moe.jsonl.

Two shapes: decode (64 tokens for each rank) and prefill (2048); hidden 2048, 64 experts, top 8,
bfloat16. Both sides move the same tokens in the same processes, in turn; see moe_worker.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from record import RESULTS, append_records, origin

import weft
from weft.bench.group import run_group, task_directory
from weft.bench.moe_workload import Workload
from weft.bench.phases import PHASES, summarise

TARGET = RESULTS / "moe.jsonl"
RANKS = 4
#: Tokens per rank, and a factor for the round count: short rounds are cheap.
SHAPES = {"decode": (64, 4), "prefill": (2048, 1)}


def main() -> int:
    """Both shapes over each path; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=25,
        help="prefill rounds (default 25); decode has 4 times more",
    )
    parser.add_argument("--paths", default="shm,tcp", help="providers (default %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=TARGET, help="result file (default %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        import_module("torch")
    except ImportError:
        print("moe: PyTorch is missing; `make bench-moe` installs it", file=sys.stderr)
        return 1
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.getenv("PYTHONPATH")])])
    wrong = 0
    for path in arguments.paths.split(","):
        for shape, (tokens, factor) in SHAPES.items():
            print(f"moe over {path}: {shape}", file=sys.stderr)
            workload = Workload(
                ranks=RANKS,
                tokens=tokens,
                hidden=2048,
                experts=64,
                top_k=8,
                dtype="bfloat16",
                routing="uniform",
                rounds=arguments.rounds * factor,
            )
            lines = measure(workload, path, shape)
            wrong += sum(line["wrong"] for line in lines)
            append_records(arguments.results, lines)
    return int(wrong > 0)


def measure(workload: Workload, path: str, shape: str) -> list[dict[str, Any]]:
    """One line for each side."""
    with task_directory({"workload": workload.to_json()}) as directory:
        ranks = run_group("moe_worker", workload.ranks, directory, path)
    build = weft.build_info()
    where = origin(
        weft=f"{build.version} {build.profile}", torch=version("torch"), numpy=version("numpy")
    )
    totals = {side: total(ranks, side) for side in ("weft", "gloo")}
    return [
        {
            "benchmark": "moe",
            "shape": shape,
            # gloo uses sockets beside every Weft path.
            "path": path if side == "weft" else "tcp",
            "beside": path,
            "side": side,
            "workload": workload.to_json(),
            "rounds": workload.rounds,
            "phases": [
                times._asdict() for times in summarise([rank["durations"][side] for rank in ranks])
            ],
            "communication_p50_us": float(np.percentile(times, 50)),
            "communication_p99_us": float(np.percentile(times, 99)),
            "ratio": float(np.median(times / totals["weft"])),
            "wrong": sum(rank["wrong"][side] for rank in ranks),
            "origin": where,
        }
        for side, times in totals.items()
    ]


def total(ranks: list[dict[str, Any]], side: str) -> np.ndarray[Any, Any]:
    """Microseconds for dispatch and combine by round, at the slowest rank."""
    phases = [phase for phase in PHASES if phase != "experts"]
    by_rank = [sum(np.array(rank["durations"][side][phase]) for phase in phases) for rank in ranks]
    result: np.ndarray[Any, Any] = np.max(by_rank, axis=0) / 1000
    return result


if __name__ == "__main__":
    sys.exit(main())
