"""One rank of the benchmark of device collectives: its state, and the results of a case."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from collectives_cases import Case
from collectives_context import Context
from collectives_measures import MEASURES
from collectives_sides import sides_of
from serving import Benchmark, figure, serve

from weft.bench.device.summary import spread
from weft.bench.group import worker

if TYPE_CHECKING:
    from pathlib import Path

#: Bytes that a rank sends over the bytes of a case, times n / (n - 1): nccl-tests' busbw factors.
STEPS: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def open_context(*arguments: Any) -> Context:
    """State of a rank, with its sides."""
    context = Context(*arguments)
    context.sides = sides_of(context)
    return context


def measure(context: Context, case: Case) -> dict[str, Any]:
    """Results of this rank in a case."""
    return MEASURES[case.kind](context, case)


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


def work(directory: Path, task: dict[str, Any]) -> None:
    """Measure every case that there is time for."""
    name = "gpu-collectives"
    serve(directory, task, Benchmark(name, Case.from_json, open_context, measure, summarise))


if __name__ == "__main__":
    sys.exit(worker(work))
