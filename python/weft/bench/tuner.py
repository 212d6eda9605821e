"""`weft tune`: collective times by every algorithm, link constants, and the regret."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from weft.bench import tuner_worker
from weft.bench.group import run_group, run_in_launched_group, task_directory, under_launcher
from weft.bench.record import timestamp
from weft.collectives.tuning import machine_name
from weft.report.tuning import label

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Options", "crossovers", "measure", "regrets"]


@dataclass(frozen=True)
class Options:
    """Measurement options."""

    ranks: int
    #: Vector bytes, rising.
    sizes: tuple[int, ...]
    provider: str | None = None
    #: Time to spend, about; large sizes take at least `batches` calls for each algorithm.
    seconds: float = 50.0
    batches: int = 3
    progress: bool = True


def measure(options: Options) -> dict[str, Any] | None:
    """Measure; the result, or None on a launcher's ranks other than 0.

    The selection is made from a first pass over all sizes, and judged by a second one.

    Raises:
        GroupError: if a rank failed.
    """
    task = asdict(options) | {"machine": machine_name(), "at": timestamp()}
    with task_directory(task) as directory:
        if under_launcher():
            results = run_in_launched_group(tuner_worker.work, directory, options.provider)
            if results is None:
                return None
        else:
            name = "weft.bench.tuner_worker"
            results = run_group(name, options.ranks, directory, options.provider)
    found: dict[str, Any] = results[0]
    entry = found["entry"]
    return {
        "entry": entry,
        "crossovers": crossovers(entry["times"]),
        "regrets": regrets(found["judged"]),
    }


def regrets(judged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Regret by collective and size: the selected algorithm's time over the fastest time.

    Args:
        judged: for each collective and size the selected algorithm, and all algorithms' times in
        the second pass: `[[algorithm, chunks, seconds], ...]`.
    """
    found = []
    for case in judged:
        best = min(case["times"], key=lambda each: each[2])
        (selected,) = (each for each in case["times"] if each[:2] == case["selected"])
        found.append(
            {
                "collective": case["collective"],
                "bytes": case["bytes"],
                "selected": label(*selected[:2]),
                "seconds": selected[2],
                "fastest": label(*best[:2]),
                "fastest_seconds": best[2],
                "regret": selected[2] / best[2],
            }
        )
    return found


def crossovers(times: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sizes at which another algorithm becomes the fastest, on the lines between measured sizes."""
    found = []
    for collective in dict.fromkeys(each["collective"] for each in times):
        curves = {
            label(each["algorithm"], each["chunks"]): dict(each["points"])
            for each in times
            if each["collective"] == collective
        }
        sizes = sorted({size for points in curves.values() for size in points})
        fastest = [
            min((name for name in curves if size in curves[name]), key=lambda n: curves[n][size])
            for size in sizes
        ]
        for (low, before), (high, after) in pairwise(zip(sizes, fastest, strict=True)):
            if before != after:
                crossing = meeting(curves[before], curves[after], low, high)
                found.append(
                    {"collective": collective, "bytes": crossing, "from": before, "to": after}
                )
    return found


def meeting(before: dict[int, float], after: dict[int, float], low: int, high: int) -> int:
    """Size at which two lines meet; the upper end if one was not measured up to there."""
    if high not in before or low not in after:
        return high
    lead, lag = after[low] - before[low], before[high] - after[high]
    share = lead / (lead + lag) if lead + lag > 0 else 1.0
    return math.ceil(low + (high - low) * share)
