"""`weft bench moe`: runs a workload over ranks, and sums up what they saw."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft.base.array import DTYPES
from weft.bench import moe_worker
from weft.bench.group import run_group, run_in_launched_group, task_directory, under_launcher
from weft.bench.moe_workload import Router
from weft.bench.phases import summarise
from weft.report import RankTrace, collect, write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from weft.bench.moe_workload import Workload

__all__ = ["Events", "Options", "measure", "write_events"]


@dataclass(frozen=True)
class Options:
    """Measurement options."""

    provider: str | None = None
    trace: Path | None = None
    progress: bool = True


def measure(workload: Workload, options: Options) -> dict[str, Any] | None:
    """Run the workload; the result, or None on a launcher's ranks other than 0.

    With a trace, the result has `events` for `write_events`.

    Raises:
        GroupError: if a rank failed.
    """
    task = {
        "workload": workload.to_json(),
        "trace": options.trace is not None,
        "progress": options.progress,
    }
    with task_directory(task) as directory:
        if under_launcher():
            launched = run_in_launched_group(moe_worker.work, directory, options.provider)
            if launched is None:
                return None
            results = launched
        else:
            results = run_group(
                "weft.bench.moe_worker", workload.ranks, directory, options.provider
            )
    summary = summarise_results(workload, results)
    if options.trace is not None:
        traces = [RankTrace.from_json(result["trace"]) for result in results]
        summary["events"] = Events(options.trace, traces)
        summary["trace_records_dropped"] = sum(trace.dropped for trace in traces)
    return summary


class Events(NamedTuple):
    """Events from all ranks, and the file for their trace."""

    path: Path
    traces: list[RankTrace]


def write_events(events: Events) -> None:
    """Write a measurement's trace."""
    error = max(trace.clock_error_ns for trace in events.traces)
    write_trace(events.path, collect(events.traces), clock_error_ns=error)


def summarise_results(workload: Workload, results: list[dict[str, Any]]) -> dict[str, Any]:
    """One summary from all ranks' results."""
    row_bytes = workload.hidden * DTYPES[workload.dtype].itemsize
    layers = imbalance(workload, np.array(results[0]["expert_load"]))
    # Tokens leave and replies return: as many rows both ways.
    moved = 2 * row_bytes * sum(sum(result["rows_sent"]) for result in results)
    naive = 2 * row_bytes * sum(result["naive_rows"] for result in results)
    return {
        "workload": workload.to_json(),
        "routes": sorted({route for result in results for route in result["routes"]}),
        "provider_details": results[0]["provider_details"],
        "phases": [
            times._asdict() for times in summarise([result["durations"] for result in results])
        ],
        "dispatch_gb_per_s": throughput(results, row_bytes, "dispatch"),
        "combine_gb_per_s": throughput(results, row_bytes, "combine"),
        "bytes_moved": moved,
        "naive_bytes": naive,
        "bytes_ratio": moved / naive if naive else None,
        # For the worst layer.
        "expert_imbalance": max((layer["expert_imbalance"] for layer in layers), default=None),
        "rank_imbalance": max((layer["rank_imbalance"] for layer in layers), default=None),
        "layers": layers,
        "memory_bytes_per_rank": max(result["memory_bytes"] for result in results),
        "wrong_rounds": sum(result["wrong_rounds"] for result in results),
        "largest_share_of_bound": max(result["largest_share_of_bound"] for result in results),
    }


def imbalance(workload: Workload, load: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Imbalance by layer: tokens of the busiest expert and rank over the mean.

    Args:
        workload: What was run.
        load: Tokens for each expert, [layers, experts]; a layer that no round came to is left out.
    """
    names = [layer.name for layer in Router(workload).layers] or [workload.routing]
    owners = [block(workload, rank) for rank in range(workload.ranks + 1)]
    found = []
    for name, by_expert in zip(names, load, strict=True):
        if by_expert.any():
            by_rank = np.array([by_expert[a:b].sum() for a, b in pairwise(owners)])
            found.append(
                {
                    "layer": name,
                    "expert_imbalance": float(by_expert.max() / by_expert.mean()),
                    "rank_imbalance": float(by_rank.max() / by_rank.mean()),
                }
            )
    return found


def block(workload: Workload, rank: int) -> int:
    """A rank's first expert."""
    return rank * workload.experts // workload.ranks


def throughput(results: list[dict[str, Any]], row_bytes: int, operation: str) -> float:
    """Median over rounds: bytes that left their rank, by the slowest rank's time.

    Both halves count, since a rank cannot do without either; total over all ranks, in GB/s.
    """
    rows = np.array([result["rows_sent"] for result in results]).sum(axis=0)
    halves = (f"{operation} send", f"{operation} recv")
    times = np.array(
        [sum(np.array(result["durations"][half]) for half in halves) for result in results]
    ).max(axis=0)
    return float(np.median(rows * row_bytes / times))
