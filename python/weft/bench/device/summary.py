"""Summary for a case over all ranks' figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["summarise"]


def summarise(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank's times, bytes, throughput, and wrong results.

    Args:
        ranks: what each rank's measure returned.
    """
    first = ranks[0]
    if "skipped" in first:
        return {"skipped": first["skipped"]}
    times = {name: spread([rank["times"][name] for rank in ranks]) for name in first["times"]}
    result: dict[str, Any] = {
        "times": times,
        "wrong": sum(rank["wrong"] for rank in ranks),
        "largest_share_of_bound": max(rank["largest_share_of_bound"] for rank in ranks),
        "heap_bytes": max(rank["facts"]["heap_bytes"] for rank in ranks),
        "path": first["facts"]["path"],
        "num_sms": first["facts"]["num_sms"],
        "positions": max((rank["facts"]["positions"] or 0) for rank in ranks) or None,
        "builds": [rank["facts"]["build"] for rank in ranks],
    }
    for name in ("compile_seconds", "constructor_seconds", "first_round_seconds"):
        if name in first:
            result[name] = [rank[name] for rank in ranks]
    if "compile_error" in first:
        errors = (rank["compile_error"] for rank in ranks)
        result["compile_error"] = next((error for error in errors if error), None)
    if "host_us" in first:
        result["host_us"] = {
            call: max(rank["host_us"][call] for rank in ranks) for call in first["host_us"]
        }
    for name in ("late_rank", "late_us", "gemm"):
        if name in first:
            result[name] = first[name]
    if "late_rank" in first:
        result["of_late_rank"] = {
            name: spread([ranks[first["late_rank"]]["times"][name]]) for name in first["times"]
        }
    if "dispatch_bytes" in first:
        result["bytes"] = volume(ranks, times)
    if "beside" in first:
        result["beside"] = beside([rank["beside"] for rank in ranks], ranks)
    return result


def spread(by_rank: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Percentiles over all ranks, and over the rank with the largest median; in microseconds."""
    arrays = [np.asarray(values, dtype=np.float64) for values in by_rank]
    medians = [float(np.median(values)) for values in arrays]
    slowest = int(np.argmax(medians))
    every = np.concatenate(arrays)
    return {
        "p50_us": float(np.median(every)),
        "p99_us": float(np.percentile(every, 99)),
        "slowest_rank": slowest,
        "slowest_p50_us": medians[slowest],
        "slowest_p99_us": float(np.percentile(arrays[slowest], 99)),
        "slowest_mean_us": float(arrays[slowest].mean()),
        "mean_us": float(every.mean()),
        "min_us": float(every.min()),
        "samples": len(arrays[slowest]),
    }


def volume(ranks: Sequence[dict[str, Any]], times: dict[str, Any]) -> dict[str, Any]:
    """Throughput: mean bytes that a rank sent to others, over the slowest rank's time."""
    found: dict[str, Any] = {"rows_per_rank": float(np.mean([rank["rows_sent"] for rank in ranks]))}
    for operation in ("dispatch", "combine"):
        sent = [rank[f"{operation}_bytes"] for rank in ranks]
        found[f"{operation}_per_rank"] = float(np.mean(sent))
        found[f"{operation}_most"] = max(sent)
        found[f"{operation}_gb_per_s"] = rate(float(np.mean(sent)), times.get(operation))
    return found


def rate(count: float, time: dict[str, Any] | None) -> float | None:
    """Bytes over the slowest rank's median, in GB/s."""
    if not time or not time["slowest_p50_us"]:
        return None
    return float(count / time["slowest_p50_us"] / 1000)


def beside(found: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The other library's times."""
    first = found[0]
    if "unable" in first:
        return first
    times = {name: spread([each["times"][name] for each in found]) for name in first["times"]}
    rates = {
        f"{operation}_gb_per_s": rate(
            float(np.mean([rank[f"{operation}_bytes"] for rank in ranks])), times[operation]
        )
        for operation in ("dispatch", "combine")
    }
    wrong = sum(each["wrong"] for each in found)
    return {"backend": first["backend"], "graph": first["graph"], "wrong": wrong} | {
        "times": times,
        **rates,
    }
