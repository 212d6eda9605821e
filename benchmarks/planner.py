"""The planners of MoE dispatch, timed by criterion. Appends to results/planner.jsonl."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from origin import ROOT, first_line, origin

RESULTS = ROOT / "benchmarks" / "results" / "planner.jsonl"
BENCH = ["cargo", "bench", "--locked", "--quiet", "-p", "weft-moe", "--bench", "planner"]


def main() -> int:
    """Measure all, and keep what criterion estimates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="cargo's target directory")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default %(default)s")
    arguments = parser.parse_args()
    begin = time.time()
    # Plots would need a plotting library or gnuplot.
    subprocess.run([*BENCH, "--", "--noplot"], cwd=ROOT, check=True)
    where = origin(rustc=first_line("rustc", "--version"))
    lines = []
    for path in sorted(arguments.target.glob("criterion/*/*/new/estimates.json")):
        if path.stat().st_mtime < begin:
            continue  # of a benchmark that is gone
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
        print("planner: criterion left no estimates", file=sys.stderr)
        return 1
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with arguments.results.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
