"""Instruction counts for writes, arrivals, queries and a proxy's puts by callgrind, compared with
instructions.json.

Counts cover user space only. Repeated runs with one build differ only by socket read sizes. A count
above the committed one by more than the tolerance is a regression: exit status 1. `--update`
rewrites the file.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import origin

BASELINE = Path(__file__).parent / "instructions.json"
TOLERANCE = 0.02
CASES = [
    ("null", "write"),
    ("later", "write"),
    ("later", "stream"),
    ("null", "scatter"),
    ("later", "scatter"),
    ("later", "group-scatter"),
    ("later", "proxy-put"),
    ("later", "proxy-scatter"),
    ("verbs-null", "write"),
    ("verbs-null", "stream"),
    ("verbs-null", "pages"),
    ("verbs-null", "scatter"),
    ("verbs-null", "group-scatter"),
    ("shm", "write"),
    ("shm", "arrival"),
    ("tcp", "write"),
    ("tcp", "arrival"),
    ("shm", "front-end-query"),
    ("shm", "accelerator-query"),
]


def main() -> int:
    """Count, compare and print differences; 1 after a regression."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fabric", required=True, help="the program weft-bench-fabric")
    parser.add_argument("--update", action="store_true", help="write the counts to the file")
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("instructions: valgrind is missing; apt-get install valgrind", file=sys.stderr)
        return 1
    counted = {f"{over} {what}": count(arguments.fabric, over, what) for over, what in CASES}
    if arguments.update:
        record = {"tolerance": TOLERANCE, "instructions": counted, "origin": origin()}
        BASELINE.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(f"{BASELINE.name} is written")
        return 0
    baseline: dict[str, Any] = json.loads(BASELINE.read_text(encoding="utf-8"))
    lines, regressed = compare(baseline["instructions"], counted, baseline["tolerance"])
    print("\n".join(lines))
    return int(bool(regressed))


def compare(
    before: dict[str, float], now: dict[str, float], tolerance: float
) -> tuple[list[str], list[str]]:
    """Report lines, and which operations regressed."""
    lines, regressed = [], []
    for name, instructions in now.items():
        if name not in before:
            lines.append(f"{name:12} {instructions:8.1f}  new")
            continue
        change = instructions / before[name] - 1
        verdict = ""
        if change > tolerance:
            verdict = "  REGRESSED"
            regressed.append(name)
        elif change < -tolerance:
            verdict = "  improved: --update records it"
        lines.append(
            f"{name:12} {instructions:8.1f}  before {before[name]:8.1f}  {change:+.1%}{verdict}"
        )
    return lines, regressed


def count(fabric: str, over: str, what: str) -> float:
    """Instructions per operation."""
    completed = over in ("later", "verbs-null") and what in ("write", "stream", "pages")
    is_query = what.endswith("query")
    function = "completed_writes" if completed else f"{what.replace('-', '_')}s"
    if is_query:
        function = f"{what.removesuffix('y').replace('-', '_')}ies"
    module = "dispatch::instructions" if is_query else "instructions"
    if what.startswith("proxy"):
        module, function = "proxy", "proxy_turn"
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "callgrind.out"
        valgrind = [
            "valgrind",
            "--quiet",
            "--tool=callgrind",
            f"--toggle-collect=weft_bench_fabric::{module}::{function}",
            f"--callgrind-out-file={file}",
        ]
        command = [fabric, "instructions", "--over", over, "--operation", what]
        if is_query or over in ("null", "later", "verbs-null"):
            command = [*valgrind, *command]
        else:
            command += ["--under", *valgrind]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        repeats = json.loads(result.stdout.splitlines()[-1])["repeats"]
        summary = re.search(r"^(?:summary|totals): (\d+)", file.read_text(), re.MULTILINE)
    if summary is None or int(summary[1]) == 0:
        raise SystemExit(f"instructions: {over} {what}: callgrind counted 0 instructions")
    return int(summary[1]) / repeats


if __name__ == "__main__":
    sys.exit(main())
