"""`weft bench moe --device`: starts ranks on GPUs, and starts them anew if a case fails."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.environment import text
from weft.bench import moe_device_worker
from weft.bench.device.machine import missing, visible
from weft.bench.group import (
    ENVIRONMENT,
    TASK,
    launch_ranks,
    task_directory,
    under_launcher,
)
from weft.bench.moe_device_worker import UNDER_WAY, failure_file, record_of
from weft.bench.record import append_record, origin

if TYPE_CHECKING:
    from weft.bench.device.cases import Case

__all__ = ["DeviceError", "Options", "is_appended", "measure"]

#: Failed cases in a row after which the run ends.
MOST_FAILURES: Final = 5
#: Beyond the budget, for a case that was begun in time.
GRACE_SECONDS: Final = 10.0
TWIN_RANKS: Final = 2


class DeviceError(Exception):
    """The measurement cannot run here."""


@dataclass(frozen=True)
class Options:
    """Measurement options."""

    #: "cuda" or "twin".
    device: str
    #: None: as many as GPUs are visible.
    ranks: int | None = None
    budget: float | None = None
    memory: str | None = None
    provider: str | None = None
    record: Path | None = None
    progress: bool = True


def measure(cases: list[Case], options: Options) -> list[dict[str, Any]]:
    """Run the cases; a record for each. Under a launcher, an empty list on all ranks but 0.

    Raises:
        DeviceError: if there is no such device here.
    """
    lacking = missing(options.device)
    if lacking is not None:
        raise DeviceError(lacking)
    ranks = options.ranks
    if ranks is None and not under_launcher():
        ranks = visible() if options.device == "cuda" else TWIN_RANKS
    budget = options.budget if options.budget is not None else 1e6
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        lines = Path(scratch, "lines.jsonl")
        if options.record is not None and is_appended(options.record):
            lines = options.record
        before = len(lines_of(lines))
        task = {
            "device": options.device,
            "ranks": ranks,
            "memory": options.memory,
            "progress": options.progress,
            "lines": os.fspath(lines.absolute()),
            # The ranks' clocks are this one: there is one host.
            "deadline": time.time() + budget,
            "grace": GRACE_SECONDS,
        }
        if under_launcher():
            run_here(cases, task)
        else:
            run_groups(cases, task, options.provider, Path(scratch, "cache"))
        return [json.loads(line) for line in lines_of(lines)[before:]]


def is_appended(record: Path) -> bool:
    """True for a file, to which each case is appended as it ends; false for a device."""
    return record.is_file() or not record.exists()


def lines_of(file: Path) -> list[str]:
    """Lines in a file; none without a file."""
    if not file.exists():
        return []
    return file.read_text(encoding="utf-8", errors="replace").splitlines()


def run_here(cases: list[Case], task: dict[str, Any]) -> None:
    """Run as one rank in a launcher's group."""
    rank0 = (text("WEFT_RANK") or text("RANK") or "0") == "0"
    possible = [case for case in cases if case.cache is None]
    for case in cases:
        if case.cache is not None and rank0:
            why = "its ranks are started anew, which is the launcher's business here"
            append_record(Path(task["lines"]), record_of(case, origin(), "skipped", why))
    with task_directory(task | {"cases": [case.to_json() for case in possible]}) as directory:
        given = json.loads((directory / TASK).read_text(encoding="utf-8"))
        try:
            moe_device_worker.work(directory, given)
        except (Exception, SystemExit):
            if rank0:
                keep_failure(directory, task, possible, 1)
            raise


def run_groups(cases: list[Case], task: dict[str, Any], provider: str | None, cache: Path) -> None:
    """Run rank groups until every case has a record."""
    waiting = list(cases)
    failures = 0
    while waiting:
        if failures >= MOST_FAILURES or time.time() >= task["deadline"]:
            why = "the budget was spent"
            if failures >= MOST_FAILURES:
                why = f"{failures} cases before it failed one after the other"
            for case in waiting:
                append_record(Path(task["lines"]), record_of(case, origin(), "skipped", why))
            return
        group = next_group(waiting)
        environment = dict(ENVIRONMENT)
        if provider is not None:
            environment["WEFT_PROVIDERS"] = provider
        if group[0].cache is not None:
            environment["WEFT_CACHE_DIR"] = os.fspath(cache)
        done, failed = run_group(group, task, environment)
        # A failed case also has a record, the last one: the ranks after it are started anew.
        failures = (failures if done == 1 else 0) + 1 if failed else 0
        waiting = waiting[max(done, 1) :]


def next_group(waiting: list[Case]) -> list[Case]:
    """Cases that the next ranks run: only one if it wants separate ranks."""
    if waiting[0].cache is not None:
        return waiting[:1]
    alone = [number for number, case in enumerate(waiting) if case.cache is not None]
    return waiting[: alone[0]] if alone else waiting


def run_group(
    group: list[Case], task: dict[str, Any], environment: dict[str, str]
) -> tuple[int, bool]:
    """Run cases by separate ranks; the number of records now, and whether the last case failed."""
    before = len(lines_of(Path(task["lines"])))
    with task_directory(task | {"cases": [case.to_json() for case in group]}) as directory:
        command = [sys.executable, "-m", moe_device_worker.__name__, os.fspath(directory)]
        outcome = launch_ranks(command, task["ranks"], environment, 5.0)
        done = len(lines_of(Path(task["lines"]))) - before
        failed = outcome.first_failure is not None and done < len(group)
        if failed:
            keep_failure(directory, task, group[done:], outcome.status)
        return done + failed, failed


def keep_failure(directory: Path, task: dict[str, Any], waiting: list[Case], status: int) -> None:
    """Append a record for the case in progress, or for the next one."""
    case, about = waiting[0], origin()
    under_way = directory / UNDER_WAY
    if under_way.exists():
        about = json.loads(under_way.read_text(encoding="utf-8"))["origin"]
    said = []
    for file in sorted(directory.glob(failure_file(directory, "*").name)):
        text = file.read_text(encoding="utf-8").strip()[-2000:]
        said.append(f"{file.stem.replace('failed-', 'rank ')}: {text}")
    reason = "\n".join(said) or f"ranks ended with status {status} (a hang, or a crash: see stderr)"
    append_record(Path(task["lines"]), record_of(case, about, "failed", reason))
