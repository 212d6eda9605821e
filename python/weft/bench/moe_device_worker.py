"""One rank in `weft bench moe --device`: its cases one after the other, each stored as it ends.

A case that fails ends this rank, since a device is undefined after an error. Ranks started anew run
the other cases.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import weft
from weft.base import environment
from weft.bench.device.beside import Beside
from weft.bench.device.cases import Case
from weft.bench.device.context import Context
from weft.bench.device.machine import describe, open_device
from weft.bench.device.measures import MEASURES
from weft.bench.device.summary import summarise
from weft.bench.group import worker
from weft.bench.record import append_record, origin

if TYPE_CHECKING:
    from weft.bench.device.machine import Device

__all__ = ["UNDER_WAY", "failure_file", "record_of", "work"]

#: File in the task directory: the case in progress.
UNDER_WAY = "under-way.json"


def failure_file(directory: Path, rank: int | str) -> Path:
    """File for a rank's error; "*" for any rank."""
    return directory / f"failed-{rank}.txt"


def work(directory: Path, task: dict[str, Any]) -> None:
    """Measure every case that there is time for."""
    cases = [Case(**case) for case in task["cases"]]
    faulthandler.enable()
    with weft.init() as communicator:
        rank = communicator.rank
        if task["ranks"] not in (None, communicator.world_size):
            raise weft.errors.ConfigurationError(
                f"--ranks is {task['ranks']}, but the launcher started {communicator.world_size}"
            )
        # One host: the local rank is the rank, unless the launcher sets another.
        named = environment.text("WEFT_LOCAL_RANK") or environment.text("LOCAL_RANK")
        local = int(named or rank)
        device = open_device(task["device"], local)
        about = origin() | describe(device, communicator.world_size)
        beside = Beside(communicator, device, directory)
        context = Context(communicator, device, beside, task["memory"])
        try:
            for case in cases:
                run(directory, task, context, case, about)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            failure_file(directory, rank).write_text(text, encoding="utf-8")
            print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        beside.stop()


def run(
    directory: Path, task: dict[str, Any], context: Context, case: Case, about: dict[str, Any]
) -> None:
    """Measure one case; rank 0 keeps the record."""
    communicator = context.communicator
    left = task["deadline"] - time.time()
    # Rank 0's clock decides for all.
    decided = communicator.all_gather(bytes([left >= case.seconds]), timeout=120)[0][0]
    if not decided:
        keep(task, communicator.rank, record_of(case, about, "skipped", "the budget was spent"))
        return
    if communicator.rank == 0:
        text = json.dumps({"case": case.name, "origin": about})
        (directory / UNDER_WAY).write_text(text, encoding="utf-8")
        if task["progress"]:
            print(f"{case.name}: {left:.0f} s left", file=sys.stderr, flush=True)
    limit = max(1.0, min(case.limit, left + task["grace"]))
    faulthandler.dump_traceback_later(limit, exit=True)
    began = time.monotonic()
    found = MEASURES[case.kind](context, case)
    gathered = communicator.all_gather(json.dumps(found).encode(), timeout=120)
    faulthandler.cancel_dump_traceback_later()
    tidy(context.device)
    if communicator.rank == 0:
        result = summarise([json.loads(each) for each in gathered])
        status, reason = "ok", None
        if "skipped" in result:
            status, reason = "skipped", result["skipped"]
        elif result["wrong"] or result.get("beside", {}).get("wrong"):
            status, reason = "wrong", "a result differs from the reference"
        record = record_of(case, about, status, reason)
        record |= {"result": result, "seconds": round(time.monotonic() - began, 2)}
        keep(task, 0, record)


def tidy(device: Device) -> None:
    """Release what the case held, so that the next one has all memory."""
    gc.collect()
    if device.kind == "cuda":
        device.torch.cuda.empty_cache()


def record_of(case: Case, about: dict[str, Any], status: str, reason: str | None) -> dict[str, Any]:
    """A result line, still without a result."""
    return {
        "benchmark": "gpu-moe",
        "case": case.name,
        "kind": case.kind,
        "status": status,
        "reason": reason,
        "workload": case.to_json(),
        "result": None,
        "seconds": None,
        "origin": about,
    }


def keep(task: dict[str, Any], rank: int, record: dict[str, Any]) -> None:
    """Append a record to the result file, at once: later cases may not end."""
    if rank == 0:
        append_record(Path(task["lines"]), record)


if __name__ == "__main__":
    sys.exit(worker(work))
