"""Shared memory collectives benchmark: Weft from Rust beside Open MPI from C.

Appends to results/collective_peers.jsonl. Each round runs both sides, in turn; see peers/mpi.c.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from record import RESULTS, append_records, origin

TARGET = RESULTS / "collective_peers.jsonl"
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all")
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
#: Open MPI's own shared memory, without UCX.
SHARED_MEMORY = ("--mca", "pml", "ob1", "--mca", "btl", "self,vader")
#: Seconds for one side in one round.
PATIENCE = 600

#: Key: collective, bytes. Value: microseconds by call.
Times = dict[tuple[str, int], list[float]]


def main() -> int:
    """All collectives on groups with each size; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fabric", type=Path, required=True, help="program weft-bench-fabric")
    parser.add_argument(
        "--programs", type=Path, required=True, help="folder with the program from peers/mpi.c"
    )
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
        "--seconds", type=float, default=0.1, help="time per case in a round (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=TARGET, help="result file (default %(default)s)"
    )
    arguments = parser.parse_args()
    program = arguments.programs / "mpi"
    if not program.exists():
        print(
            "collective peers: Open MPI is missing; install libopenmpi-dev, openmpi-bin",
            file=sys.stderr,
        )
        return 0
    wrong = 0
    for ranks in map(int, arguments.ranks.split(",")):
        lines = measure(arguments, program, ranks)
        wrong += sum(line["wrong"] for line in lines)
        append_records(arguments.results, lines)
    return int(wrong > 0)


def measure(arguments: argparse.Namespace, program: Path, ranks: int) -> list[dict[str, Any]]:
    """One line for each collective, size and side."""
    commands = {
        "weft": weft_command(arguments, ranks),
        "openmpi": mpi_command(arguments, program, ranks),
    }
    rounds: dict[str, list[Times]] = defaultdict(list)
    wrong: dict[tuple[str, str, int], int] = defaultdict(int)
    for number in range(arguments.rounds):
        for side in sorted(commands, reverse=number % 2 == 0):
            print(
                f"{ranks} ranks: round {number + 1} of {arguments.rounds}, {side}", file=sys.stderr
            )
            found: Times = {}
            for line in run(commands[side]):
                key = line["collective"], line["bytes"]
                found[key] = line["us"]
                wrong[side, *key] += line["wrong"]
            rounds[side].append(found)
    where = origin(openmpi=mpi_version())
    return [
        {
            "benchmark": "collective-peers",
            "shape": collective,
            "bytes": count,
            "ranks": ranks,
            "path": "shm",
            "side": side,
            **summary(rounds, side, (collective, count)),
            "wrong": wrong[side, collective, count],
            "origin": where,
        }
        for collective, count in rounds["weft"][0]
        for side in commands
    ]


def summary(rounds: dict[str, list[Times]], side: str, key: tuple[str, int]) -> dict[str, Any]:
    """Minimum, median and 99th percentile over all calls, and the median ratio to Weft's rounds."""
    pooled = sorted(time for times in rounds[side] for time in times[key])
    pairs = zip(rounds[side], rounds["weft"], strict=True)
    ratios = [median(times[key]) / median(weft[key]) for times, weft in pairs]
    return {
        "rounds": len(ratios),
        "calls": len(pooled),
        "min_us": pooled[0],
        "p50_us": median(pooled),
        "p99_us": pooled[len(pooled) * 99 // 100],
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def weft_command(arguments: argparse.Namespace, ranks: int) -> list[str]:
    """Weft over shm. With more ranks than cores, waits yield the core without an option."""
    command = [str(arguments.fabric), "filled", "--path", "shm", "--ranks", str(ranks)]
    command += ["--collectives", arguments.collectives, "--sizes", arguments.sizes]
    return [*command, "--seconds", str(arguments.seconds)]


def mpi_command(arguments: argparse.Namespace, program: Path, ranks: int) -> list[str]:
    """Open MPI; with more ranks than cores waits yield the core, which it selects itself."""
    crowded = ranks > len(os.sched_getaffinity(0))
    bind = ["--oversubscribe", "--bind-to", "none"] if crowded else ["--bind-to", "core"]
    command = ["mpirun", "--allow-run-as-root", *SHARED_MEMORY, *bind, "-n", str(ranks)]
    case = [str(arguments.seconds), "2000", arguments.collectives, arguments.sizes]
    return [*command, str(program), *case]


def run(command: list[str]) -> list[dict[str, Any]]:
    """JSON lines from a program."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def mpi_version() -> str:
    """Open MPI version."""
    done = subprocess.run(["mpirun", "--version"], stdout=subprocess.PIPE, text=True, check=True)
    found = re.search(r"\d+(\.\d+)+", done.stdout)
    return found[0] if found else "unknown"


if __name__ == "__main__":
    sys.exit(main())
