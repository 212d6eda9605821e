"""One rank in the fused operator benchmark: state, and the results for a case."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Final

import harness.records
from fused_cases import Case
from fused_context import Context
from fused_measures import compare
from harness.rank import Benchmark, main
from harness.records import Summary, figure, over_ranks, verdict

__all__ = ["summarise"]

#: Time for the last chunk and flag to reach a peer, in the perfect overlap bound.
LATENCY_US: Final = 2.0
#: Noun for a case's computation, as in `fused_data`.
WORDS: Final = {
    "embedding": "pool",
    "gemv": "gemv",
    "gemv_norm": "gemv",
    "norm": "norm",
    "gemm": "gemm",
    "scaled": "gemm",
}
#: Libraries for the other computation.
OTHERS: Final = ("torch", "triton")


def summarise(case: Case, ranks: list[dict[str, Any]]) -> Summary:
    """Result, status and reason, from every rank's results."""
    for status in ("skipped", "failed"):
        if status in ranks[0]:
            return None, status, ranks[0][status]
    sides = over_ranks(ranks, partial(add_facts, case))
    result = {key: value for key, value in ranks[0].items() if key != "sides"} | {"sides": sides}
    result |= figures(case, sides)
    if case.is_varied:
        result["ratios"] = ratios(sides)
    return verdict(result, sides["fused"]["status"], sides["fused"]["reason"])


def figures(case: Case, sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Fused operator comparisons; None where the sides have no time.

    Returns:
        `fused` is the faster fused operator side, for the others. `best_unfused` is the fastest
        other side and `speedup` its time over the fused one's; `speedup_nccl` is the ratio for
        Weft's computation, or the only one, with NCCL's collective. `computation_us` and
        `exchange_us` are for the separate parts, by Weft and by the fastest library; `hidden` is
        the share of the shorter part that the fused operator hides, and `bound_us` its time at
        perfect overlap. `other_computation` is the other library's computation time over Weft's.
        `speedup_default` is the time of the fastest side, other than the fused operator, over its
        default call's, which may be unfused, with an ordinary or symmetric output; None if it
        always runs the kernel.
    """
    times = harness.records.figures(sides)
    word = WORDS[case.computation]
    # Not a forced algorithm's sides.
    own_choice = (name for name in ("fused", "fused symmetric") if name in times)
    fastest = min(own_choice, key=times.__getitem__, default=None)
    fused = times[fastest] if fastest else None
    by_default = [us for name, us in times.items() if name.startswith("default")]
    wholes = [name for name in times if " + " in name or name == "torch pipelined"]
    best = min(wholes, key=times.__getitem__, default=None)
    exchange = min((us for name, us in times.items() if name.endswith(" alone")), default=None)
    own = times.get(f"weft {word}")
    other = next(
        (times.get(f"{name} {word}") for name in OTHERS if f"{name} {word}" in times), None
    )
    computation = own or other
    # Weft's computation comes first, if it has one.
    beside_nccl = next((us for name, us in times.items() if name.endswith("+ nccl")), None)
    made: dict[str, Any] = {
        "fused": fastest,
        "best_unfused": best,
        "speedup": times[best] / fused if best and fused else None,
        "speedup_nccl": beside_nccl / fused if beside_nccl and fused else None,
        "speedup_default": times[best] / min(by_default) if best and by_default else None,
        "computation_us": computation,
        "exchange_us": exchange,
        "other_computation": other / own if other and own else None,
        "hidden": None,
        "bound_us": None,
    }
    if computation and exchange:
        made["bound_us"] = max(computation, exchange) + LATENCY_US
        if fused:
            made["hidden"] = (computation + exchange - fused) / min(computation, exchange)
    return made


def ratios(sides: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """A varied case's side times over the default's; None for sides without a time."""
    base = figure(sides["fused"])
    return {
        name: us / base if base and (us := figure(side)) else None
        for name, side in sides.items()
        if name != "fused"
    }


def add_facts(case: Case, side: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Add checks to a side."""
    first = ranks[0]
    side |= {"is_whole": first["is_whole"], "is_ours": first["is_ours"]}
    if first["is_whole"]:
        share = max(rank["share"] for rank in ranks)
        is_replicated = case.collective == "all_reduce"
        equal = len({rank["digest"] for rank in ranks}) == 1 if is_replicated else None
        side |= {"largest_share_of_bound": share, "replicas_equal": equal}
        if not share <= 1:
            side |= {"status": "wrong", "reason": f"an error is {share:.3g} of its bound"}
        elif equal is False and first["is_ours"]:
            side |= {"status": "wrong", "reason": "ranks have different bits"}


BENCHMARK: Final = Benchmark("gpu-fused", Case.from_json, Context, compare, summarise)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
