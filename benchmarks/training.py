"""Training on the CPU over Weft and over gloo, in one run.

Appends to results/training.jsonl: for each model, method and side the step time and the mean loss
over all ranks in each step; see training_worker.py. gloo uses sockets beside every Weft path.
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

TARGET = RESULTS / "training.jsonl"
SIDES = ("weft", "gloo")
#: Relative loss difference that rounding explains: gradient sums in another order.
ROUNDING = 1e-4
#: Steps whose losses are compared: training amplifies rounding from step to step.
COMPARED = 6


def main() -> int:
    """All models by all methods; 1 if losses differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="shm", help="Weft provider (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default %(default)s)")
    parser.add_argument("--models", default="resnet,bert", help="models (default %(default)s)")
    parser.add_argument("--methods", default="ddp,fsdp2", help="methods (default %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps (default %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=TARGET, help="result file (default %(default)s)"
    )
    arguments = parser.parse_args()
    for module in ("torch", "sklearn"):
        try:
            import_module(module)
        except ImportError:
            print(f"training: {module} is missing; run `make bench-training`", file=sys.stderr)
            return 1
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.getenv("PYTHONPATH")])])
    task = {
        "models": arguments.models.split(","),
        "methods": arguments.methods.split(","),
        "steps": arguments.steps,
    }
    lines = measure(task, arguments.path, arguments.ranks)
    append_records(arguments.results, lines)
    differences = {line["loss_difference"] for line in lines}
    return int(max(differences) > ROUNDING)


def measure(task: dict[str, Any], path: str, ranks: int) -> list[dict[str, Any]]:
    """One line for each model, method and side."""
    with task_directory(task) as directory:
        results = run_group("training_worker", ranks, directory, path)
    build = weft.build_info()
    where = origin(weft=f"{build.version} {build.profile}", torch=version("torch"))
    lines = []
    for case in range(len(results[0]["cases"])):
        cases = [result["cases"][case] for result in results]
        losses = {side: np.mean([each["losses"][side] for each in cases], axis=0) for side in SIDES}
        # A step ends when the slowest rank's does; the first ones allocate.
        times = {
            side: np.max([each["ms"][side] for each in cases], axis=0)[task["steps"] // 6 :]
            for side in SIDES
        }
        difference = np.max(np.abs(losses["weft"] / losses["gloo"] - 1)[:COMPARED])
        lines += [
            {
                "benchmark": "training",
                "shape": f"{cases[0]['model']}, {cases[0]['method']}",
                "ranks": ranks,
                "path": path if side == "weft" else "tcp",
                "beside": path,
                "side": side,
                "steps": task["steps"],
                "p50_ms": float(np.percentile(times[side], 50)),
                "p99_ms": float(np.percentile(times[side], 99)),
                "ratio": float(np.median(times[side]) / np.median(times["weft"])),
                "first_loss": float(losses[side][0]),
                "last_loss": float(losses[side][-1]),
                "loss_difference": float(difference),
                "origin": where,
            }
            for side in SIDES
        ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
