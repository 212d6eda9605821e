"""One rank of the benchmark of fused operators: its state, and the results of a case."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from fused_cases import Case
from fused_context import Context
from fused_measures import compare
from serving import Benchmark, figure, serve

from weft.bench.device.summary import spread
from weft.bench.group import worker

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["summarise"]

#: Time of the last piece's way to a peer and of its flag, in the bound of a perfect overlap.
LATENCY_US: Final = 2.0
#: Noun of the computation of a case, as in `fused_data`.
WORDS: Final = {
    "embedding": "pool",
    "gemv": "gemv",
    "gemv_norm": "gemv",
    "norm": "norm",
    "gemm": "gemm",
    "scaled": "gemm",
}
#: Libraries of the other computation.
OTHERS: Final = ("torch", "triton")


def summarise(
    case: Case, ranks: list[dict[str, Any]]
) -> tuple[dict[str, Any] | None, str, str | None]:
    """Result, status and reason, of the results of every rank."""
    for status in ("skipped", "failed"):
        if status in ranks[0]:
            return None, status, ranks[0][status]
    sides = {
        name: side_of(case, [rank["sides"][name] for rank in ranks]) for name in ranks[0]["sides"]
    }
    result = {key: value for key, value in ranks[0].items() if key != "sides"} | {"sides": sides}
    result |= figures(case, sides)
    if case.is_varied:
        result["ratios"] = ratios(sides)
    wrong = [name for name, side in sides.items() if side["status"] == "wrong"]
    result["wrong"] = len(wrong)
    fused = sides["fused"]
    if wrong:
        return result, "wrong", "; ".join(f"{name}: {sides[name]['reason']}" for name in wrong)
    return result, fused["status"], fused["reason"]


def figures(case: Case, sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Comparisons of the fused operator; None for those whose sides have no time.

    Returns:
        `fused` is the faster side of the fused operator, for the others. `best_unfused` is the
        fastest of all other sides and `speedup` its time over the fused one's;
        `speedup_nccl` is that of Weft's computation, or the only one, with NCCL's collective.
        `computation_us` and `exchange_us` are of the parts alone, by Weft and by the fastest
        library; `hidden` is the share of the shorter part that the fused operator hides, and
        `bound_us` its time at perfect overlap. `other_computation` is the time of the other
        library's computation over that of Weft's. `speedup_default` is the time of the fastest
        side, other than the fused operator, over that of its call by default, which may be
        unfused, with an ordinary or symmetric output; None if it always runs the kernel.
    """
    times = {name: us for name, side in sides.items() if (us := figure(side))}
    word = WORDS[case.computation]
    # Not those of an algorithm that is forced.
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
    """Times of a varied case's sides over the default's; None for those without a time."""
    base = figure(sides["fused"])
    return {
        name: us / base if base and (us := figure(side)) else None
        for name, side in sides.items()
        if name != "fused"
    }


def side_of(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One side over all ranks."""
    first = ranks[0]
    made = {"status": first["status"], "reason": first["reason"]}
    if first["status"] != "ok":
        return made
    made["time"] = spread([rank["times"] for rank in ranks])
    made |= {"is_whole": first["is_whole"], "is_ours": first["is_ours"]}
    if first["is_whole"]:
        share = max(rank["share"] for rank in ranks)
        is_replicated = case.collective == "all_reduce"
        equal = len({rank["digest"] for rank in ranks}) == 1 if is_replicated else None
        made |= {"largest_share_of_bound": share, "replicas_equal": equal}
        if not share <= 1:
            made |= {"status": "wrong", "reason": f"an error is {share:.3g} of its bound"}
        elif equal is False and first["is_ours"]:
            made |= {"status": "wrong", "reason": "ranks have different bits"}
    return made


def work(directory: Path, task: dict[str, Any]) -> None:
    """Measure every case that there is time for."""
    serve(directory, task, Benchmark("gpu-fused", Case.from_json, Context, compare, summarise))


if __name__ == "__main__":
    sys.exit(worker(work))
