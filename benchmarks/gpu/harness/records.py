"""Result lines, and a side's figures over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.bench.device.summary import spread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Summary", "best_peer", "figure", "figures", "over_ranks", "record_of", "verdict"]

#: A case's result, status and reason.
Summary = tuple[dict[str, Any] | None, str, str | None]


def record_of(
    benchmark: str, case: Any, about: dict[str, Any], status: str, reason: str | None
) -> dict[str, Any]:
    """A result line, without a result."""
    return {
        "benchmark": benchmark,
        "case": case.name,
        "kind": case.kind,
        "status": status,
        "reason": reason,
        "workload": case.to_json(),
        "result": None,
        "seconds": None,
        "origin": about,
    }


def figure(side: dict[str, Any]) -> float | None:
    """A side's microseconds: the slowest rank's median."""
    if side.get("status") != "ok":
        return None
    return float(side["time"]["slowest_p50_us"])


def figures(sides: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Microseconds by side, for sides with a time."""
    return {name: us for name, side in sides.items() if (us := figure(side))}


def over_ranks(
    ranks: list[dict[str, Any]], add: Callable[[dict[str, Any], list[dict[str, Any]]], None]
) -> dict[str, dict[str, Any]]:
    """Sides over all ranks: status, reason and time.

    Args:
        ranks: each rank's results.
        add: adds more to a side whose status is "ok", from every rank's results for it.
    """
    sides = {}
    for name, first in ranks[0]["sides"].items():
        side = sides[name] = {"status": first["status"], "reason": first["reason"]}
        if first["status"] == "ok":
            found = [rank["sides"][name] for rank in ranks]
            side["time"] = spread([each["times"] for each in found])
            add(side, found)
    return sides


def best_peer(
    sides: dict[str, dict[str, Any]], own: str | None, is_own: Callable[[str], bool]
) -> dict[str, Any]:
    """The fastest side that is not Weft's, and the ratio of `own`'s time to that side's."""
    times = figures(sides)
    best = min((name for name in times if not is_own(name)), key=times.__getitem__, default=None)
    ratio = times[own] / times[best] if own in times and best else None
    return {"best_peer": best, "of_best_peer": ratio}


def verdict(result: dict[str, Any], status: str, reason: str | None) -> Summary:
    """A case's summary: wrong sides decide, otherwise the given status."""
    sides = result["sides"].items()
    wrong = [f"{name}: {side['reason']}" for name, side in sides if side["status"] == "wrong"]
    result["wrong"] = len(wrong)
    return (result, "wrong", "; ".join(wrong)) if wrong else (result, status, reason)
