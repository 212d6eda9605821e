"""Groups of ranks that a benchmark runs, until every case has a record.

Ranks are processes, one for each GPU. If a case or a side ends them, they are started anew for the
cases that follow.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from collectives_context import UNDER_WAY
from serving import record_of

from weft import launch
from weft.bench.device.machine import visible
from weft.bench.group import ENVIRONMENT, task_directory
from weft.bench.record import append_record, origin

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = ["Program", "add_options", "run_cases", "show_failures"]

#: NVLink multicast stays off: the fabric managers of shared servers may not recover from its loss.
WITHOUT_MULTICAST: Final = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
#: Beyond the budget, for a case that was begun in time; in seconds.
GRACE_SECONDS: Final = 10.0
#: Failed starts or cases in a row after which the run ends.
MOST_FAILURES: Final = 4
#: Ranks of the twin, by default.
TWIN_RANKS: Final = 2


class Program(NamedTuple):
    """A benchmark, as its launcher has it."""

    #: Name in records.
    name: str
    #: Program of a rank.
    rank: Path
    #: Of a case and a side that ended the ranks: what the next ranks leave out, as a key of the
    #: task's `excluded`; "" if the case has failed.
    excludes: Callable[[str, str], str]


class Failure(NamedTuple):
    """Failure of a group of ranks."""

    reason: str
    #: Case and side in progress, if any was.
    case: str
    side: str
    origin: dict[str, Any]


def add_options(parser: argparse.ArgumentParser, results: Path) -> None:
    """Options of every benchmark of ranks: device, ranks, budget, results, JSON."""
    parser.add_argument(
        "--device", choices=("cuda", "twin"), default="cuda", help="device (default %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, help="number of ranks (default: one for each visible GPU)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=1e6,
        metavar="SECONDS",
        help="time limit: cases that exceed it are skipped",
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help=f"file of JSON lines (default {results.name})"
    )
    parser.add_argument("--json", action="store_true", help="JSON output")


def read(lines: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    if not lines.exists():
        return []
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


def run_cases(
    arguments: argparse.Namespace, program: Program, results: Path, **task: Any
) -> list[dict[str, Any]]:
    """Records of the cases `arguments.chosen`.

    Args:
        arguments: options of `add_options`.
        program: of the benchmark.
        results: file of records of GPUs, unless the options name another.
        task: what else the ranks read.
    """
    ranks = arguments.ranks or (visible() if arguments.device == "cuda" else TWIN_RANKS)
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        lines = arguments.results
        if lines is None:
            lines = results if arguments.device == "cuda" else Path(scratch, "lines.jsonl")
        before = len(read(lines))
        task |= {
            "device": arguments.device,
            "ranks": ranks,
            "progress": not arguments.json,
            "lines": os.fspath(lines.absolute()),
            # The ranks' clocks are this one: there is one host.
            "deadline": time.time() + arguments.budget,
            "grace": GRACE_SECONDS,
        }
        run_groups(arguments.chosen, task, program)
        return read(lines)[before:]


def run_groups(cases: Sequence[Any], task: dict[str, Any], program: Program) -> None:
    """Run groups of ranks until every case has a record."""
    waiting, lines = list(cases), Path(task["lines"])
    excluded: dict[str, str] = {}
    failures = 0

    def keep(case: Any, about: dict[str, Any], status: str, reason: str) -> None:
        append_record(lines, record_of(program.name, case, about, status, reason))

    while waiting:
        if failures >= MOST_FAILURES or time.time() >= task["deadline"]:
            why = "the budget was spent"
            if failures >= MOST_FAILURES:
                why = f"{failures} groups of ranks before it failed one after the other"
            # The case in progress may have lost its time to a side.
            why = "; ".join([why, *(f"{side} failed in {text}" for side, text in excluded.items())])
            for case in waiting:
                keep(case, origin(), "skipped", why)
            return
        before = len(read(lines))
        failure = run_group(waiting, task | {"excluded": excluded}, program)
        done = len(read(lines)) - before
        waiting = waiting[done:]
        failures = 0 if done else failures
        if failure is None or not waiting:
            continue
        failures += 1
        # Ranks that ended in their start, at the time limit: no case is to blame.
        if not failure.case and time.time() >= task["deadline"]:
            continue
        key = ""
        if failure.case == waiting[0].name:
            key = program.excludes(failure.case, failure.side)
        if key:
            print(f"{waiting[0].name}: {failure.side} is left out", file=sys.stderr)
            excluded[key] = f"{waiting[0].name}: {failure.reason}"
        else:
            keep(waiting[0], failure.origin, "failed", failure.reason)
            waiting = waiting[1:]


def run_group(waiting: list[Any], task: dict[str, Any], program: Program) -> Failure | None:
    """Run ranks; None if they ended as they should."""
    environment = ENVIRONMENT | {
        name: os.environ.get(name, value) for name, value in WITHOUT_MULTICAST.items()
    }
    with task_directory(task | {"cases": [case.to_json() for case in waiting]}) as directory:
        command = [sys.executable, os.fspath(program.rank), os.fspath(directory)]
        config = launch.LaunchConfig(
            command, task["ranks"], environment=environment, prefix=False, grace_seconds=3.0
        )
        outcome = launch.launch(config)
        if outcome.first_failure is None:
            return None
        state: dict[str, Any] = {"case": "", "side": "", "origin": origin()}
        under_way = directory / UNDER_WAY
        if under_way.exists():
            state = json.loads(under_way.read_text(encoding="utf-8"))
        texts = [
            f"{file.stem.replace('failed-', 'rank ')}: "
            + file.read_text(encoding="utf-8").strip()[-1500:]
            for file in sorted(directory.glob("failed-*.txt"))
        ]
        ended = f"ranks ended with status {outcome.status} (time limit or crash: see stderr)"
        return Failure("\n".join(texts) or ended, **state)


def show_failures(records: list[dict[str, Any]]) -> None:
    """Print the reasons of cases and sides without a result, each once."""
    reasons: dict[str, list[str]] = {}
    for record in records:
        if record["reason"]:
            reasons.setdefault(f"{record['status']}: {record['reason']}", []).append(record["case"])
        for name, side in (record["result"] or {}).get("sides", {}).items():
            if side["status"] != "wrong" and side["reason"] not in (None, record["reason"]):
                text = f"{name} {side['status']}: {side['reason']}"
                reasons.setdefault(text, []).append(record["case"])
    for reason, cases in reasons.items():
        print(f"{', '.join(cases)}: {reason}")
