"""Idle ranks and crowded cores. Appends to results/host.jsonl."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from origin import ROOT, origin

RESULTS = ROOT / "benchmarks" / "results" / "host.jsonl"


def main() -> int:
    """Measure both over each path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fabric", required=True, help="the program weft-bench-fabric")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default %(default)s")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    for path in ("shm", "tcp"):
        for benchmark in ("crowd", "idle"):
            print(f"{benchmark} over {path}", file=sys.stderr)
            command = [arguments.fabric, benchmark, "--path", path, "--json"]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            line = json.loads(output) | {"origin": origin()}
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
