"""Run a command by hand and keep what came of it.

`python3 benchmarks/record.py NAME COMMAND...` shows the command's output as it comes, and appends
one JSON line to `benchmarks/results/NAME.jsonl`: when and where it ran, on which commit, how it
ended, and each line of its output that reads `outcome {...}`.
"""

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTCOME = "outcome "


def said_by(*command: str) -> str:
    """The first line that a program prints; empty if there is no such program."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return (done.stdout.splitlines() or [""])[0]


def cpu_model() -> str:
    """As the kernel names it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(name: str, *command: str) -> int:
    """Run `command` and append its record to the results of `name`; its exit status."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "cpu": cpu_model(), "kernel": platform.release()},
        "versions": {"rustc": said_by("rustc", "--version"), "python": platform.python_version()},
        "commit": said_by("git", "rev-parse", "HEAD"),
        "modified": bool(said_by("git", "status", "--porcelain", "--untracked-files=no")),
        "command": " ".join(command),
    }
    start = time.monotonic()
    outcomes = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(OUTCOME):
                outcomes.append(json.loads(line[len(OUTCOME) :]))
    record |= {
        "seconds": round(time.monotonic() - start, 1),
        "exit": process.returncode,
        "outcomes": outcomes,
    }
    path = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as results:
        results.write(json.dumps(record) + "\n")
    return process.returncode


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
