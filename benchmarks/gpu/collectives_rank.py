"""One rank of the benchmark of device collectives: its cases in order, each recorded as it ends.

A watchdog ends the rank at the limit of a case. Ranks started anew run the other cases.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

import numpy as np
from collectives_cases import Case
from collectives_context import Context
from collectives_measures import MEASURES
from collectives_sides import sides_of

import weft
from weft.bench.device.machine import describe, open_device
from weft.bench.device.summary import spread
from weft.bench.group import worker
from weft.bench.record import append_record, origin

__all__ = ["record_of", "work"]

#: Limits of the start and of the end of a rank, in seconds.
START_SECONDS: Final = 90.0
END_SECONDS: Final = 20.0
#: Bytes that a rank sends over the bytes of a case, times n / (n - 1): nccl-tests' busbw factors.
STEPS: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def work(directory: Path, task: dict[str, Any]) -> None:
    """Measure every case that there is time for."""
    cases = [Case.from_json(case) for case in task["cases"]]
    faulthandler.enable()
    left = task["deadline"] + task["grace"] - time.time()
    faulthandler.dump_traceback_later(max(1.0, min(START_SECONDS, left)), exit=True)
    with weft.init() as communicator:
        rank = communicator.rank
        local = int(os.environ.get("WEFT_LOCAL_RANK", rank))
        device = open_device(task["device"], local)
        about = origin() | describe(device, communicator.world_size)
        context = Context(communicator, device, directory, cases, task, about)
        context.sides = sides_of(context)
        try:
            for case in cases:
                run(context, case)
            faulthandler.dump_traceback_later(END_SECONDS, exit=True)
            context.close()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            (directory / f"failed-{rank}.txt").write_text(text, encoding="utf-8")
            print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            # After a fault of the device the ends of its libraries may wait for ever.
            os._exit(1)
    faulthandler.cancel_dump_traceback_later()


def run(context: Context, case: Case) -> None:
    """Measure one case; rank 0 keeps the record."""
    task, device = context.task, context.device
    left = task["deadline"] - time.time()
    # Rank 0's clock decides for all.
    if not context.agree(left >= case.seconds)[0]:
        keep(context, record_of(case, context.about, "skipped", "the budget was spent"))
        return
    context.under_way(case.name, "")
    if context.rank == 0 and task["progress"]:
        print(f"{case.name}: {left:.0f} s left", file=sys.stderr, flush=True)
    limit = max(1.0, min(case.limit, left + task["grace"]))
    faulthandler.dump_traceback_later(limit, exit=True)
    began = time.monotonic()
    found = MEASURES[case.kind](context, case)
    gathered = context.agree(found)
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    gc.collect()
    if device.kind == "cuda":
        device.torch.cuda.empty_cache()
    result, status, reason = summarise(case, gathered)
    record = record_of(case, context.about, status, reason)
    keep(context, record | {"result": result, "seconds": round(time.monotonic() - began, 2)})


def keep(context: Context, record: dict[str, Any]) -> None:
    """Append a record to the file of results at once: later cases may fail."""
    if context.rank == 0:
        append_record(Path(context.task["lines"]), record)


def record_of(case: Case, about: dict[str, Any], status: str, reason: str | None) -> dict[str, Any]:
    """A line of results, without a result."""
    return {
        "benchmark": "gpu-collectives",
        "case": case.name,
        "kind": case.kind,
        "status": status,
        "reason": reason,
        "workload": case.to_json(),
        "result": None,
        "seconds": None,
        "origin": about,
    }


def summarise(case: Case, ranks: list[dict[str, Any]]) -> tuple[dict[str, Any], str, str | None]:
    """Result, status and reason, of what every rank measured."""
    sides = {
        name: side_of(case, [rank["sides"][name] for rank in ranks]) for name in ranks[0]["sides"]
    }
    result = {key: value for key, value in ranks[0].items() if key != "sides"} | {"sides": sides}
    weft_us = figure(sides.get("weft", {}))
    peers = {
        name: time
        for name, side in sides.items()
        if not name.startswith("weft") and case.kind != "sweep" and (time := figure(side))
    }
    result["best_peer"] = min(peers, key=lambda name: peers[name], default=None)
    best = peers.get(result["best_peer"])
    result["of_best_peer"] = weft_us / best if weft_us and best else None
    wrong = [name for name, side in sides.items() if side["status"] == "wrong"]
    result["wrong"] = len(wrong)
    if wrong:
        return result, "wrong", f"results differ from the reference: {', '.join(wrong)}"
    if sides["weft"]["status"] != "ok":
        return result, "failed", sides["weft"]["reason"]
    return result, "ok", None


def side_of(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One side over all ranks."""
    first = ranks[0]
    made = {"status": first["status"], "reason": first["reason"]}
    if first["status"] != "ok":
        return made
    made["time"] = spread([rank["times"] for rank in ranks])
    for name in ("host", "single"):
        if name in first:
            made[name] = spread([rank[name] for rank in ranks])
    if "phases" in first:
        made["phases"] = {
            name: spread([rank["phases"][name] for rank in ranks]) for name in first["phases"]
        }
    if case.operation in STEPS and case.bytes:
        rate = case.bytes / made["time"]["slowest_p50_us"] / 1000
        made["algbw_gb_per_s"] = rate
        made["busbw_gb_per_s"] = rate * STEPS[case.operation] * (len(ranks) - 1) / len(ranks)
    if "exact" in first:
        share = float(np.max([rank["largest_share_of_bound"] for rank in ranks]))
        made |= {
            "exact": all(rank["exact"] for rank in ranks),
            "in_place": first["in_place"],
            "largest_share_of_bound": share if np.isfinite(share) else None,
        }
        ours = first["ours"]
        if not share <= 1 or (ours and not made["exact"]):
            made |= {"status": "wrong", "reason": "a result differs from the reference"}
    return made


def figure(side: dict[str, Any]) -> float | None:
    """Microseconds of a side: the slowest rank's median."""
    if side.get("status") != "ok":
        return None
    return float(side["time"]["slowest_p50_us"])


if __name__ == "__main__":
    sys.exit(worker(work))
