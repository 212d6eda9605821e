"""One rank in a benchmark: its cases in order, each recorded as it ends.

A watchdog ends the rank at a case's limit. Ranks started anew run the other cases.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import weft
from harness.records import record_of
from weft.bench.device.machine import describe, open_device
from weft.bench.group import worker
from weft.bench.record import append_record, origin

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.context import Context
    from harness.records import Summary

__all__ = ["Benchmark", "main"]

#: Limits for a rank's start and end, in seconds.
START_SECONDS: Final = 90.0
END_SECONDS: Final = 20.0


class Benchmark(NamedTuple):
    """A benchmark, as ranks have it."""

    #: Name in records.
    name: str
    #: Case from JSON fields.
    case: Callable[[dict[str, Any]], Any]
    #: A rank's state, from the `Context` arguments.
    open: Callable[..., Context]
    #: A rank's results in a case; a collective call.
    measure: Callable[[Any, Any], dict[str, Any]]
    #: Takes a case and every rank's results.
    summarise: Callable[[Any, list[dict[str, Any]]], Summary]


def main(benchmark: Benchmark) -> int:
    """Main function for a rank's program; returns the exit status."""
    return worker(partial(serve, benchmark))


def serve(benchmark: Benchmark, directory: Path, task: dict[str, Any]) -> None:
    """Measure every case that there is time for."""
    cases = [benchmark.case(case) for case in task["cases"]]
    faulthandler.enable()
    left = task["deadline"] + task["grace"] - time.time()
    faulthandler.dump_traceback_later(max(1.0, min(START_SECONDS, left)), exit=True)
    with weft.init() as communicator:
        rank = communicator.rank
        local = int(os.environ.get("WEFT_LOCAL_RANK", rank))
        device = open_device(task["device"], local)
        about = origin() | describe(device, communicator.world_size)
        context = benchmark.open(communicator, device, directory, cases, task, about)
        try:
            for case in cases:
                run(context, case, benchmark)
            faulthandler.dump_traceback_later(END_SECONDS, exit=True)
            context.close()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            (directory / f"failed-{rank}.txt").write_text(text, encoding="utf-8")
            print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            # After a device fault, the libraries may wait for ever at the end.
            os._exit(1)
    faulthandler.cancel_dump_traceback_later()


def run(context: Context, case: Any, benchmark: Benchmark) -> None:
    """Measure one case; rank 0 keeps the record."""
    task, device = context.task, context.device
    left = task["deadline"] - time.time()
    # Rank 0's clock decides for all.
    if not context.agree(left >= case.seconds)[0]:
        why = "the budget was spent"
        keep(context, record_of(benchmark.name, case, context.about, "skipped", why))
        return
    context.under_way(case.name, "")
    if context.rank == 0 and task["progress"]:
        print(f"{case.name}: {left:.0f} s left", file=sys.stderr, flush=True)
    limit = max(1.0, min(case.limit, left + task["grace"]))
    faulthandler.dump_traceback_later(limit, exit=True)
    began = time.monotonic()
    found = benchmark.measure(context, case)
    gathered = context.agree(found)
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    gc.collect()
    if device.kind == "cuda":
        device.torch.cuda.empty_cache()
    result, status, reason = benchmark.summarise(case, gathered)
    record = record_of(benchmark.name, case, context.about, status, reason)
    keep(context, record | {"result": result, "seconds": round(time.monotonic() - began, 2)})


def keep(context: Context, record: dict[str, Any]) -> None:
    """Append a record to the result file at once: later cases may fail."""
    if context.rank == 0:
        append_record(Path(context.task["lines"]), record)
