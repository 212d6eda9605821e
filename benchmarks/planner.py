"""MoE dispatch planner benchmark, with criterion. Appends to results/planner.jsonl."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from record import RESULTS, ROOT, append_records, first_line, origin

TARGET = RESULTS / "planner.jsonl"
BENCH = ["cargo", "bench", "--locked", "--quiet", "-p", "weft-moe", "--bench", "planner"]


def main() -> int:
    """Run the benchmark and append criterion's estimates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="cargo's target directory")
    parser.add_argument("--results", type=Path, default=TARGET, help="default %(default)s")
    arguments = parser.parse_args()
    begin = time.time()
    # Plots would need a plotting library or gnuplot.
    subprocess.run([*BENCH, "--", "--noplot"], cwd=ROOT, check=True)
    where = origin(rustc=first_line("rustc", "--version"))
    lines = []
    for path in sorted(arguments.target.glob("criterion/*/*/new/estimates.json")):
        if path.stat().st_mtime < begin:
            continue  # left by a removed benchmark
        median = json.loads(path.read_text(encoding="utf-8"))["median"]
        named = json.loads((path.parent / "benchmark.json").read_text(encoding="utf-8"))
        interval = median["confidence_interval"]
        lines.append(
            {
                "benchmark": "planner",
                "plan": named["group_id"],
                "routing": named["function_id"],
                "median_us": median["point_estimate"] / 1000,
                "median_95_us": [interval[f"{end}_bound"] / 1000 for end in ("lower", "upper")],
                "origin": where,
            }
        )
    if not lines:
        print("planner: criterion wrote no estimates", file=sys.stderr)
        return 1
    append_records(arguments.results, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
