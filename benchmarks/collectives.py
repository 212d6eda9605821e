"""torch.distributed benchmark over Weft and over gloo, on CPU tensors.

Appends to results/collectives.jsonl. All sides run the same calls in the same processes, in turn;
see collectives_worker.py. gloo uses sockets beside every Weft path. DeepSpeed's all-reduce over
shared memory, which is made for inference, is a side on request, beside Weft's operator
(results/deepspeed.jsonl). `--back-to-back`: 4-byte calls beside torch's own cost per call
(results/torch_calls.jsonl).
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
DEEPSPEED_TARGET = RESULTS / "deepspeed.jsonl"
CALLS_TARGET = RESULTS / "torch_calls.jsonl"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
SIZES = (
    4,
    1 << 10,
    2 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
)
SIDES = ("weft", "gloo")
OPERATORS = ("operator", "deepspeed")
#: Side whose time is the base for another side's ratio, for example `operator` for DeepSpeed;
#: `weft` for others.
BASES = {"deepspeed": "operator"}
#: Longest vector in the DeepSpeed comparison, in bytes.
DEEPSPEED_BYTES = 1 << 20


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
        help="bytes, input or output, whichever is larger (default %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time for each size (default %(default)s)"
    )
    parser.add_argument(
        "--deepspeed",
        action="store_true",
        help="DeepSpeed's all-reduce over shared memory beside both: up to 1 MiB, over shm",
    )
    parser.add_argument(
        "--back-to-back",
        action="store_true",
        help="only 4-byte all-reduces, back to back, beside torch's backend fake",
    )
    parser.add_argument(
        "--results", type=Path, help="result file (default: one in results, by comparison)"
    )
    arguments = parser.parse_args()
    try:
        import_module("torch")
    except ImportError:
        print(
            "collectives: PyTorch is missing; `make bench-collectives` installs it", file=sys.stderr
        )
        return 1
    if arguments.deepspeed:
        if reason := missing_deepspeed():
            print(f"collectives: DeepSpeed's all-reduce cannot be built: {reason}", file=sys.stderr)
            return 1
        arguments.paths, arguments.collectives = "shm", "all_reduce"
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.getenv("PYTHONPATH")])])
    if arguments.back_to_back:
        lines = [
            back_to_back(path, ranks)
            for path in arguments.paths.split(",")
            for ranks in map(int, arguments.ranks.split(","))
        ]
        append_records(arguments.results or CALLS_TARGET, lines)
        return 0
    target = arguments.results or (DEEPSPEED_TARGET if arguments.deepspeed else TARGET)
    wrong = 0
    for path in arguments.paths.split(","):
        for ranks in map(int, arguments.ranks.split(",")):
            sides = [*SIDES, *(OPERATORS if arguments.deepspeed else ())]
            task = {
                "sides": sides,
                "collectives": arguments.collectives.split(","),
                "sizes": [
                    int(size)
                    for size in arguments.sizes.split(",")
                    if not arguments.deepspeed or int(size) <= DEEPSPEED_BYTES
                ],
                "seconds": arguments.seconds,
            }
            print(f"collectives over {path}: {ranks} ranks", file=sys.stderr)
            lines = measure(task, path, ranks)
            wrong += sum(line["wrong"] for line in lines)
            append_records(target, lines)
    return int(wrong > 0)


def measure(task: dict[str, Any], path: str, ranks: int) -> list[dict[str, Any]]:
    """One line for each collective, size and side."""
    sides = task["sides"]
    if "deepspeed" in sides:
        # It uses shared memory if these are set, and names it by them; its threads share the cores.
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        os.environ |= {"LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": str(threads)}
        os.environ |= {"MASTER_ADDR": "weft", "MASTER_PORT": f"{os.getpid()}-{ranks}"}
    with task_directory(task) as directory:
        results = run_group("collectives_worker", ranks, directory, path)
    for left in Path("/dev/shm").glob(f"deepspeed_*_weft_{os.getpid()}-{ranks}_*"):
        left.unlink()
    build = weft.build_info()
    versions = {"torch": version("torch"), "numpy": version("numpy")}
    if "deepspeed" in sides:
        versions["deepspeed"] = version("deepspeed")
    where = origin(weft=f"{build.version} {build.profile}", **versions)
    lines = []
    for case in range(len(results[0]["cases"])):
        cases = [result["cases"][case] for result in results]
        # A call ends when the slowest rank's does.
        times = {
            side: np.max([each["microseconds"][side] for each in cases], axis=0) for side in sides
        }
        lines += [
            {
                "benchmark": "collectives",
                "shape": cases[0]["collective"],
                "bytes": cases[0]["bytes"],
                "ranks": ranks,
                "path": "tcp" if side == "gloo" else path,
                "beside": path,
                "side": side,
                "calls": len(times[side]),
                "p50_us": float(np.percentile(times[side], 50)),
                "p99_us": float(np.percentile(times[side], 99)),
                "ratio": float(np.median(times[side]) / np.median(times[BASES.get(side, "weft")])),
                "wrong": sum(each["wrong"][side] for each in cases),
                "floor_us": results[0]["floor_us"],
                "origin": where,
            }
            for side in sides
        ]
    return lines


def back_to_back(path: str, ranks: int) -> dict[str, Any]:
    """4-byte all-reduces at the slowest rank, and torch's own time there.

    A call over Weft ends no earlier than torch itself on the slower one of two cores.
    """
    with task_directory({"back_to_back": True}) as directory:
        results = run_group("collectives_worker", ranks, directory, path)
    slowest = max(results, key=lambda result: float(np.percentile(result["weft"], 50)))
    build = weft.build_info()
    return {
        "benchmark": "torch-calls",
        "shape": "all_reduce",
        "bytes": 4,
        "ranks": ranks,
        "path": path,
        "calls": len(slowest["weft"]),
        "p50_us": float(np.percentile(slowest["weft"], 50)),
        "p99_us": float(np.percentile(slowest["weft"], 99)),
        "floor_us": max(float(np.percentile(result["fake"], 50)) for result in results),
        "origin": origin(weft=f"{build.version} {build.profile}", torch=version("torch")),
    }


def missing_deepspeed() -> str | None:
    """Build DeepSpeed's all-reduce; the reason why it cannot be, or None."""
    try:
        from collectives_worker import deepspeed_all_reduce

        deepspeed_all_reduce(0, 1)
    except Exception as error:  # the builder raises any error
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


if __name__ == "__main__":
    sys.exit(main())
