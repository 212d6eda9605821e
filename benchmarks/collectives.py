"""Benchmark of torch.distributed over Weft and over gloo, on CPU tensors.

Appends to results/collectives.jsonl. Both backends run the same calls in the same processes, in
turn; see collectives_worker.py. gloo uses sockets beside every path of Weft.
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

TARGET = RESULTS / "collectives.jsonl"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
SIDES = ("weft", "gloo")


def main() -> int:
    """All collectives over each path; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", default="shm,tcp", help="providers (default %(default)s)")
    parser.add_argument("--ranks", default="2,4", help="group sizes (default %(default)s)")
    parser.add_argument(
        "--collectives", default=",".join(COLLECTIVES), help="collectives (default %(default)s)"
    )
    parser.add_argument(
        "--sizes",
        default=",".join(map(str, SIZES)),
        help="bytes of the larger of input and output (default %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time for each size (default %(default)s)"
    )
    parser.add_argument(
        "--results", type=Path, default=TARGET, help="result file (default %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        import_module("torch")
    except ImportError:
        print(
            "collectives: PyTorch is missing; `make bench-collectives` installs it", file=sys.stderr
        )
        return 1
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.getenv("PYTHONPATH")])])
    wrong = 0
    for path in arguments.paths.split(","):
        for ranks in map(int, arguments.ranks.split(",")):
            task = {
                "collectives": arguments.collectives.split(","),
                "sizes": [int(size) for size in arguments.sizes.split(",")],
                "seconds": arguments.seconds,
            }
            print(f"collectives over {path}: {ranks} ranks", file=sys.stderr)
            lines = measure(task, path, ranks)
            wrong += sum(line["wrong"] for line in lines)
            append_records(arguments.results, lines)
    return int(wrong > 0)


def measure(task: dict[str, Any], path: str, ranks: int) -> list[dict[str, Any]]:
    """One line for each collective, size and side."""
    with task_directory(task) as directory:
        results = run_group("collectives_worker", ranks, directory, path)
    build = weft.build_info()
    where = origin(
        weft=f"{build.version} {build.profile}", torch=version("torch"), numpy=version("numpy")
    )
    lines = []
    for case in range(len(results[0]["cases"])):
        cases = [result["cases"][case] for result in results]
        # A call ends with its slowest rank.
        times = {
            side: np.max([each["microseconds"][side] for each in cases], axis=0) for side in SIDES
        }
        lines += [
            {
                "benchmark": "collectives",
                "shape": cases[0]["collective"],
                "bytes": cases[0]["bytes"],
                "ranks": ranks,
                "path": path if side == "weft" else "tcp",
                "beside": path,
                "side": side,
                "calls": len(times[side]),
                "p50_us": float(np.percentile(times[side], 50)),
                "p99_us": float(np.percentile(times[side], 99)),
                "ratio": float(np.median(times[side]) / np.median(times["weft"])),
                "wrong": sum(each["wrong"][side] for each in cases),
                "floor_us": results[0]["floor_us"],
                "origin": where,
            }
            for side in SIDES
        ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
