"""A benchmark's parent: rank groups, until every case has a record, and tables.

Ranks are processes, one for each GPU. If a case or a side ends them, they are started anew for the
next cases.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from harness.context import UNDER_WAY
from harness.records import record_of
from weft import launch
from weft.bench.device.machine import missing, visible
from weft.bench.group import ENVIRONMENT, task_directory
from weft.bench.record import append_record, origin
from weft.cli.table import format_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = ["WITHOUT_MULTICAST", "Program", "main", "show_sides", "show_table"]

#: The benchmarks' folder.
FOLDER: Final = Path(__file__).parent.parent

#: NVLink multicast stays off: shared servers' fabric managers may not recover without it.
WITHOUT_MULTICAST: Final = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
#: Beyond the budget, for a case that was begun in time; in seconds.
GRACE_SECONDS: Final = 10.0
#: Failed starts or cases in a row after which the run ends.
MOST_FAILURES: Final = 4
#: Twin ranks by default, for example for tests on the CPU.
TWIN_RANKS: Final = 2


def in_case(case: str, side: str) -> str:
    """Key in the task's `excluded` that leaves a side out in one case."""
    return f"{case}: {side}" if side else ""


class Program(NamedTuple):
    """A benchmark, as the launcher has it."""

    #: Name in records. The program for a rank is `NAME_rank.py`, without "gpu-".
    name: str
    #: Line above the tables: units and percentiles.
    unit: str
    #: Prints tables, from the records that have results.
    tables: Callable[[list[dict[str, Any]]], None]
    #: Given a case and a side that ended the ranks: what the next ranks leave out, as a key in the
    #: task's `excluded`; "" if the case has failed.
    excludes: Callable[[str, str], str] = in_case
    #: True if there may be more ranks than GPUs.
    shares_gpus: bool = False
    #: True if the twin's ranks run Triton kernels, by the interpreter.
    interprets: bool = False
    #: Runs before the first ranks, if the device is there.
    prepare: Callable[[argparse.Namespace], None] | None = None

    @property
    def rank(self) -> Path:
        """A rank's program."""
        return FOLDER / f"{self.name.removeprefix('gpu-').replace('-', '_')}_rank.py"

    @property
    def results(self) -> Path:
        """The file with GPU records."""
        return FOLDER.parent / "results" / f"{self.name.replace('-', '_')}.jsonl"


class Failure(NamedTuple):
    """A rank group's failure."""

    reason: str
    #: Case and side in progress, if any was.
    case: str
    side: str
    origin: dict[str, Any]


def main(program: Program, arguments: argparse.Namespace) -> int:
    """Run the cases `arguments.chosen`, and print them; 1 if one was wrong or has failed."""
    lacking = missing(arguments.device)
    if lacking is None and arguments.device == "cuda" and not program.shares_gpus:
        gpus = visible()
        if (arguments.ranks or 1) > gpus:
            lacking = f"--ranks {arguments.ranks}: expected at most {gpus}, the visible GPUs"
    if lacking is not None:
        print(f"{program.name.removeprefix('gpu-')}: {lacking}", file=sys.stderr)
        return 1
    if program.prepare is not None:
        program.prepare(arguments)
    records = run_cases(arguments, program)
    if arguments.json:
        print(json.dumps({"cases": records}))
    else:
        show(records, program)
    return int(any(record["status"] in ("wrong", "failed") for record in records))


def read(lines: Path) -> list[dict[str, Any]]:
    """Records in a file."""
    if not lines.exists():
        return []
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


def run_cases(arguments: argparse.Namespace, program: Program) -> list[dict[str, Any]]:
    """Records for the cases `arguments.chosen`."""
    ranks = arguments.ranks or (visible() if arguments.device == "cuda" else TWIN_RANKS)
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        lines = arguments.results
        if lines is None:
            lines = program.results if arguments.device == "cuda" else Path(scratch, "lines.jsonl")
        before = len(read(lines))
        task = {
            "device": arguments.device,
            "ranks": ranks,
            # Measuring time per side, in some benchmarks.
            "seconds": getattr(arguments, "seconds", None),
            "progress": not arguments.json,
            "lines": os.fspath(lines.absolute()),
            # The ranks' clocks are this one: there is one host.
            "deadline": time.time() + arguments.budget,
            "grace": GRACE_SECONDS,
        }
        run_groups(arguments.chosen, task, program)
        return read(lines)[before:]


def run_groups(cases: Sequence[Any], task: dict[str, Any], program: Program) -> None:
    """Run rank groups until every case has a record."""
    waiting, lines = list(cases), Path(task["lines"])
    excluded: dict[str, str] = {}
    failures = 0

    def keep(case: Any, about: dict[str, Any], status: str, reason: str) -> None:
        append_record(lines, record_of(program.name, case, about, status, reason))

    while waiting:
        if failures >= MOST_FAILURES or time.time() >= task["deadline"]:
            why = "the budget was spent"
            if failures >= MOST_FAILURES:
                why = f"{failures} rank groups before it failed one after the other"
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
        # The ranks ended while starting, at the time limit: no case is to blame.
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
    if program.interprets and task["device"] == "twin":
        environment["TRITON_INTERPRET"] = "1"
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


def show(records: list[dict[str, Any]], program: Program) -> None:
    """Print records as tables."""
    about = next((each["origin"] for each in records if "device" in each["origin"]), None)
    if about is not None:
        gpus = ", ".join(sorted(set(about["gpus"]))) or "CPU twin: times are not representative"
        print(f"{about['ranks']} ranks ({gpus}); {program.unit}\n")
    program.tables([each for each in records if each["result"]])
    show_failures(records)


def show_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, unless it has no rows."""
    if rows:
        print(format_table(headers, rows) + "\n")


def show_sides(
    records: list[dict[str, Any]], cell: Callable[[dict[str, Any]], Any], **more: str
) -> None:
    """Print a row for each case: the sides' cells, the best peer, and Weft's figures `more`."""
    names = list(dict.fromkeys(name for each in records for name in each["result"]["sides"]))
    rows = []
    for record in records:
        result, sides = record["result"], record["result"]["sides"]
        cells = [cell(sides.get(name, {})) for name in names]
        peer = [result["best_peer"], result["of_best_peer"]]
        rows.append(
            [record["case"], *cells, *peer, *(sides["weft"].get(key) for key in more.values())]
        )
    show_table(("case", *names, "best peer", "weft / best peer", *more), rows)


def show_failures(records: list[dict[str, Any]]) -> None:
    """Print why cases and sides have no result, each reason once."""
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
