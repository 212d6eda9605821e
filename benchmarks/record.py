"""Benchmark recorder: runs a command by hand and appends the outcome to a result file.

    python3 benchmarks/record.py NAME COMMAND...

The command's output is shown as it comes. `benchmarks/results/NAME.jsonl` gets one JSON line: the
provenance, the exit status, and each output line that is a JSON object, by itself or behind the
word `outcome`. Other benchmarks import `origin` and `append_records` from here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGINNINGS = ("outcome {", "{")


def main(name: str, *command: str) -> int:
    """Run `command` and append a record to the results `name`; returns the exit status."""
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
        # The checkout path stays out of the record.
        "command": " ".join(command).replace(f"{ROOT}/", ""),
        "seconds": round(time.monotonic() - start, 1),
        "exit": process.returncode,
        "outcomes": outcomes,
    }
    append_records(RESULTS / f"{name}.jsonl", [record])
    return process.returncode


@cache
def package() -> ModuleType:
    """The `weft bench` recorder, loaded from its file: the package need not be built."""
    file = ROOT / "python" / "weft" / "bench" / "record.py"
    spec = importlib.util.spec_from_file_location("weft_bench_record", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def machine() -> dict[str, Any]:
    """This machine's processor, cores, memory, cache and kernel."""
    found: dict[str, Any] = package().machine()
    return found


def append_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Append records to a JSON-lines file."""
    package().append_records(path, records)


def origin(**versions: str | None) -> dict[str, Any]:
    """Provenance for this checkout's figures. `versions`: the other measured systems'."""
    return {
        "at": package().timestamp(),
        "commit": commit(),
        # Identifies the sources even if history is rewritten.
        "sources": first_line("git", "rev-parse", "--short=12", "HEAD:crates"),
        "machine": machine(),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | versions,
    }


def commit() -> str:
    """The commit that is checked out, with `+` if files differ from it."""
    # Results are themselves files that change.
    but_results = ("--", ".", ":!benchmarks/results")
    changed = first_line("git", "status", "--porcelain", "--untracked-files=no", *but_results)
    name = first_line("git", "rev-parse", "--short=12", "HEAD")
    return (name or "unknown") + ("+" if changed else "")


def first_line(*command: str) -> str:
    """First line in a program's output; empty if the program fails or is missing."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return (done.stdout.splitlines() or [""])[0].strip()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
