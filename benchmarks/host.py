"""Idle ranks, and more ranks than cores. Appends to results/host.jsonl."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from record import RESULTS, append_records, origin

TARGET = RESULTS / "host.jsonl"


def main() -> int:
    """Both measurements over each path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fabric", required=True, help="the program weft-bench-fabric")
    parser.add_argument("--results", type=Path, default=TARGET, help="default %(default)s")
    arguments = parser.parse_args()
    for path in ("shm", "tcp"):
        for benchmark in ("crowd", "idle"):
            print(f"{benchmark} over {path}", file=sys.stderr)
            command = [arguments.fabric, benchmark, "--path", path, "--json"]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            append_records(arguments.results, [json.loads(output) | {"origin": origin()}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
