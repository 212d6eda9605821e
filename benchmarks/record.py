"""Run a command by hand and keep what came of it.

`python3 benchmarks/record.py NAME COMMAND...` shows the command's output as it comes, and appends
one JSON line to `benchmarks/results/NAME.jsonl`: where it ran and on what, how it ended, and each
line of its output that is a JSON object, alone or behind the word `outcome`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from origin import ROOT, first_line, origin

BEGINNINGS = ("outcome {", "{")


def main(name: str, *command: str) -> int:
    """Run `command` and append its record to the results of `name`; its exit status."""
    record = {"origin": origin(rustc=first_line("rustc", "--version"))}
    start = time.monotonic()
    outcomes = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(BEGINNINGS):
                outcomes.append(json.loads(line.removeprefix("outcome ")))
    record |= {
        # Where the repository lies is nobody's business.
        "command": " ".join(command).replace(f"{ROOT}/", ""),
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
