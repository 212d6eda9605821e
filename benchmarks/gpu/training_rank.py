"""One rank of the benchmark of training: its state, and the results of a case."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from serving import Benchmark, figure, serve
from training_cases import Case
from training_context import Context
from training_measures import compare
from training_sides import sides_of

from weft.bench.device.summary import spread
from weft.bench.group import worker

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["summarise"]

#: Relative differences that rounding explains: of mean losses, of norms of gradients in the first
#: steps, and of the output of decoders. Sums differ by their order, and steps amplify that.
LOSS_BOUND: Final = 2e-2
NORM_BOUND: Final = 5e-2
#: Steps whose gradients are compared.
NORMS: Final = 2
OUTPUT_BOUND: Final = 5e-2


def open_context(*arguments: Any) -> Context:
    """State of a rank, with its sides."""
    context = Context(*arguments)
    sides: dict[str, Any] = sides_of(context)
    context.sides = sides
    # The backend's library may have to be built, for which no case has time; a failure is kept.
    context.attempt(lambda: context.group("weft"))
    return context


def summarise(
    case: Case, ranks: list[dict[str, Any]]
) -> tuple[dict[str, Any] | None, str, str | None]:
    """Result, status and reason, of the results of every rank."""
    if "skipped" in ranks[0]:
        return None, "skipped", ranks[0]["skipped"]
    sides = {name: side_of([rank["sides"][name] for rank in ranks]) for name in ranks[0]["sides"]}
    judge(sides)
    peers = {
        name: time
        for name, side in sides.items()
        if not name.startswith("weft") and (time := figure(side))
    }
    best = min(peers, key=lambda name: peers[name], default=None)
    weft_us = figure(sides["weft"])
    result = {
        "sides": sides,
        "best_peer": best,
        "of_best_peer": weft_us / peers[best] if weft_us and best else None,
    }
    wrong = [name for name, side in sides.items() if side["status"] == "wrong"]
    result["wrong"] = len(wrong)
    if wrong:
        reasons = (f"{name}: {sides[name]['reason']}" for name in wrong)
        return result, "wrong", "; ".join(reasons)
    if sides["weft"]["status"] != "ok":
        return result, "failed", sides["weft"]["reason"]
    return result, "ok", None


def side_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One side over all ranks, not yet compared."""
    first = ranks[0]
    made: dict[str, Any] = {"status": first["status"], "reason": first["reason"]}
    if first["status"] != "ok":
        return made
    made["time"] = spread([rank["times"] for rank in ranks])
    if "error" in first:
        return made | {"error": float(np.max([rank["error"] for rank in ranks]))}
    squares = np.array([rank["squares"] for rank in ranks])
    is_replica = first["digest"] is not None
    return made | {
        "losses": np.mean([rank["losses"] for rank in ranks], axis=0).tolist(),
        "last_loss": float(np.mean([rank["last_loss"] for rank in ranks])),
        # A replica has the whole gradient, a shard its part.
        "gradient_norms": np.sqrt(squares[0] if is_replica else squares.sum(axis=0)).tolist(),
        "replicas_equal": len({rank["digest"] for rank in ranks}) == 1 if is_replica else None,
    }


def judge(sides: dict[str, dict[str, Any]]) -> None:
    """Set `wrong` for sides whose results are not those of the reference.

    The reference of losses and gradients is the first other library, if one ran.
    """
    measured = {name: side for name, side in sides.items() if side["status"] == "ok"}
    others = [name for name in measured if not name.startswith("weft")]
    reference = measured[(others or list(measured))[0]] if measured else {}
    for side in measured.values():
        reason = None
        if "error" in side:
            if not side["error"] <= OUTPUT_BOUND:
                reason = f"the output's relative error is {side['error']:.3g}"
        elif side["replicas_equal"] is False:
            reason = "parameters differ between ranks"
        elif not math.isfinite(side["last_loss"]):
            reason = "the last loss is not finite"
        else:
            for name, key, steps, bound in (
                ("losses", "loss_difference", None, LOSS_BOUND),
                ("gradient_norms", "gradient_difference", NORMS, NORM_BOUND),
            ):
                ratios = np.array(side[name][:steps]) / np.array(reference[name][:steps])
                side[key] = float(np.max(np.abs(ratios - 1)))
                if not side[key] <= bound:
                    reason = f"{name} differ by {side[key]:.3g} of the reference's"
        if reason is not None:
            side |= {"status": "wrong", "reason": reason}
    for side in measured.values():
        side |= {key: finite(value) for key, value in side.items()}


def finite(value: Any) -> Any:
    """A number or a list with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def work(directory: Path, task: dict[str, Any]) -> None:
    """Measure every case that there is time for."""
    serve(
        directory, task, Benchmark("gpu-training", Case.from_json, open_context, compare, summarise)
    )


if __name__ == "__main__":
    sys.exit(worker(work))
