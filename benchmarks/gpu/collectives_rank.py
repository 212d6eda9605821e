"""One rank in the device collectives benchmark: state, and the results for a case."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Final

import numpy as np
from collectives_cases import Case
from collectives_measures import MEASURES
from collectives_sides import sides_of
from harness.context import Context
from harness.rank import Benchmark, main
from harness.records import Summary, best_peer, over_ranks, verdict

from weft.bench.device.summary import spread

#: Bytes that a rank sends over the case's bytes, times n / (n - 1): busbw factors in nccl-tests.
STEPS: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def open_context(*arguments: Any) -> Context:
    """A rank's state, with sides."""
    context = Context(*arguments)
    context.sides = sides_of(context)
    return context


def measure(context: Context, case: Case) -> dict[str, Any]:
    """This rank's results in a case."""
    return MEASURES[case.kind](context, case)


def summarise(case: Case, ranks: list[dict[str, Any]]) -> Summary:
    """Result, status and reason, from every rank's measurements."""
    sides = over_ranks(ranks, partial(add_facts, case))
    result = {key: value for key, value in ranks[0].items() if key != "sides"} | {"sides": sides}
    result |= best_peer(sides, "weft", lambda name: name.startswith("weft"))
    weft = sides["weft"]
    weft_status = "ok" if weft["status"] == "ok" else "failed"
    _, status, reason = verdict(result, weft_status, weft["reason"])
    if status == "wrong":
        wrong = (name for name, side in sides.items() if side["status"] == "wrong")
        reason = f"results differ from the reference: {', '.join(wrong)}"
    return result, status, reason


def add_facts(case: Case, side: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Add times, rates and checks to a side."""
    first = ranks[0]
    for name in ("host", "single"):
        if name in first:
            side[name] = spread([rank[name] for rank in ranks])
    if "phases" in first:
        side["phases"] = {
            name: spread([rank["phases"][name] for rank in ranks]) for name in first["phases"]
        }
    if case.operation in STEPS and case.bytes:
        rate = case.bytes / side["time"]["slowest_p50_us"] / 1000
        side["algbw_gb_per_s"] = rate
        side["busbw_gb_per_s"] = rate * STEPS[case.operation] * (len(ranks) - 1) / len(ranks)
    if "exact" in first:
        share = float(np.max([rank["largest_share_of_bound"] for rank in ranks]))
        side |= {
            "exact": all(rank["exact"] for rank in ranks),
            "in_place": first["in_place"],
            "largest_share_of_bound": share if np.isfinite(share) else None,
        }
        if not share <= 1 or (first["ours"] and not side["exact"]):
            side |= {"status": "wrong", "reason": "a result differs from the reference"}


BENCHMARK: Final = Benchmark("gpu-collectives", Case.from_json, open_context, measure, summarise)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
