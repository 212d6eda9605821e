"""Benchmark of collectives between the GPUs of one host: Weft beside NCCL and torch's operators.

Appends a record of each case to results/gpu_collectives.jsonl as it ends. Ranks are processes, one
for each GPU. A side that fails is recorded as failed in its case, and the other sides run; if it
ends the ranks, they are started anew without it. `--device twin` runs Weft's sides on the CPU, for
tests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from collectives_cases import Case, choose, small
from collectives_context import UNDER_WAY
from collectives_rank import figure, record_of

from weft import launch
from weft.bench.device.machine import missing, visible
from weft.bench.group import ENVIRONMENT, task_directory
from weft.bench.record import append_record, origin
from weft.cli.table import format_table

RESULTS: Final = Path(__file__).parent.parent / "results" / "gpu_collectives.jsonl"
RANK: Final = Path(__file__).parent / "collectives_rank.py"
#: NVLink multicast stays off: the fabric managers of shared servers may not recover from its loss.
WITHOUT_MULTICAST: Final = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
#: Beyond the budget, for a case that was begun in time; and for the ends of ranks. In seconds.
GRACE_SECONDS: Final = 10.0
#: Failed starts or cases in a row after which the run ends.
MOST_FAILURES: Final = 4
TWIN_RANKS: Final = 2


def main() -> int:
    """All cases; 1 if a result was wrong or a case failed."""
    arguments = parse()
    lacking = missing(arguments.device)
    if lacking is not None:
        print(f"collectives: {lacking}", file=sys.stderr)
        return 1
    cases = arguments.chosen
    ranks = arguments.ranks or (visible() if arguments.device == "cuda" else TWIN_RANKS)
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        lines = arguments.results
        if lines is None:
            lines = RESULTS if arguments.device == "cuda" else Path(scratch, "lines.jsonl")
        before = len(read(lines))
        task = {
            "device": arguments.device,
            "ranks": ranks,
            "seconds": arguments.seconds,
            "progress": not arguments.json,
            "lines": os.fspath(lines.absolute()),
            # The ranks' clocks are this one: there is one host.
            "deadline": time.time() + arguments.budget,
            "grace": GRACE_SECONDS,
        }
        run_groups(cases, task)
        records = read(lines)[before:]
    if arguments.json:
        print(json.dumps({"cases": records}))
    else:
        show(records)
    return int(any(record["status"] in ("wrong", "failed") for record in records))


def parse() -> argparse.Namespace:
    """The options, with the cases as `chosen`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=("cuda", "twin"), default="cuda", help="device (default %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, help="number of ranks (default: one for each visible GPU)"
    )
    parser.add_argument(
        "--cases",
        metavar="NAME,...",
        help="cases by name or first word, as `all_reduce 8M,barrier` (default: all but sweep)",
    )
    parser.add_argument("--sweep", action="store_true", help="short for --cases sweep")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.15,
        help="measuring time of a side in a case, within 20 to 200 replays (default %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=1e6,
        metavar="SECONDS",
        help="time limit: cases that exceed it are skipped",
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help=f"file of JSON lines (default {RESULTS.name})"
    )
    parser.add_argument("--json", action="store_true", help="JSON output")
    arguments = parser.parse_args()
    if arguments.sweep and arguments.cases:
        parser.error("--sweep and --cases: expected one of both")
    if arguments.ranks is not None and arguments.ranks < 1:
        parser.error(f"--ranks {arguments.ranks}: expected 1 or more")
    for name in ("seconds", "budget"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name} {getattr(arguments, name)}: expected more than 0")
    try:
        arguments.chosen = choose("sweep" if arguments.sweep else arguments.cases)
    except ValueError as error:
        parser.error(str(error))
    if arguments.device == "twin":
        arguments.chosen = small(arguments.chosen)
        if not arguments.chosen:
            parser.error("--device twin: no case is short enough; expected sizes up to 64K")
    return arguments


def read(lines: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    if not lines.exists():
        return []
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


def run_groups(cases: list[Case], task: dict[str, Any]) -> None:
    """Run groups of ranks until every case has a record."""
    waiting, lines = list(cases), Path(task["lines"])
    excluded: dict[str, str] = {}
    failures = 0
    while waiting:
        if failures >= MOST_FAILURES or time.time() >= task["deadline"]:
            why = "the budget was spent"
            if failures >= MOST_FAILURES:
                why = f"{failures} groups of ranks before it failed one after the other"
            # The case in progress may have lost its time to a side.
            why = "; ".join([why, *(f"{side} failed in {text}" for side, text in excluded.items())])
            for case in waiting:
                append_record(lines, record_of(case, origin(), "skipped", why))
            return
        before = len(read(lines))
        failure = run_group(waiting, task | {"excluded": excluded})
        done = len(read(lines)) - before
        waiting = waiting[done:]
        failures = 0 if done else failures
        if failure is None or not waiting:
            continue
        failures += 1
        # Ranks that ended in their start, at the time limit: no case is to blame.
        if not failure.case and time.time() >= task["deadline"]:
            continue
        side = failure.side if failure.case == waiting[0].name else ""
        if side not in ("", "weft"):
            print(f"{waiting[0].name}: {side} is left out from here on", file=sys.stderr)
            excluded[side] = f"{waiting[0].name}: {failure.reason}"
        else:
            append_record(lines, record_of(waiting[0], failure.origin, "failed", failure.reason))
            waiting = waiting[1:]


class Failure(NamedTuple):
    """Failure of a group of ranks."""

    reason: str
    #: Case and side in progress, if any was.
    case: str
    side: str
    origin: dict[str, Any]


def run_group(waiting: list[Case], task: dict[str, Any]) -> Failure | None:
    """Run ranks; None if they ended as they should."""
    environment = ENVIRONMENT | {
        name: os.environ.get(name, value) for name, value in WITHOUT_MULTICAST.items()
    }
    with task_directory(task | {"cases": [case.to_json() for case in waiting]}) as directory:
        command = [sys.executable, os.fspath(RANK), os.fspath(directory)]
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


def show(records: list[dict[str, Any]]) -> None:
    """Print records as tables."""
    about = next((each["origin"] for each in records if "device" in each["origin"]), None)
    if about is not None:
        gpus = ", ".join(sorted(set(about["gpus"]))) or "CPU twin: times are not representative"
        print(f"{about['ranks']} ranks ({gpus}); µs a call, median of the slowest rank\n")
    shown = [each for each in records if each["kind"] in ("collective", "barrier")]
    found = [each for each in shown if each["result"]]
    names = list(dict.fromkeys(name for each in found for name in each["result"]["sides"]))
    rows = [
        [
            each["case"],
            *(figure(each["result"]["sides"].get(name, {})) for name in names),
            each["result"]["best_peer"],
            each["result"]["of_best_peer"],
            each["result"]["sides"]["weft"].get("busbw_gb_per_s"),
        ]
        for each in found
    ]
    headers = ("case", *names, "best peer", "weft / best peer", "weft busbw GB/s")
    if rows:
        print(format_table(headers, rows) + "\n")
    for each in records:
        if each["kind"] not in ("collective", "barrier") and each["result"]:
            show_other(each)
    show_failures(records)


def show_other(record: dict[str, Any]) -> None:
    """Print a sweep, calls without a graph, or products beside."""
    rows = []
    for name, side in record["result"]["sides"].items():
        if side["status"] != "ok":
            continue
        row: dict[str, Any] = {"": name, "µs": side["time"]["slowest_p50_us"]}
        row["p99"] = side["time"]["slowest_p99_us"]
        for extra in ("host", "single"):
            if extra in side:
                row[extra] = side[extra]["slowest_p50_us"]
        for phase, time_of in side.get("phases", {}).items():
            row[phase] = time_of["slowest_p50_us"]
        rows.append(row)
    if rows:
        print(record["case"])
        print(format_table(list(rows[0]), [list(row.values()) for row in rows]) + "\n")


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


if __name__ == "__main__":
    sys.exit(main())
