"""One rank in the training benchmark: state, and the results for a case."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from harness.context import Context
from harness.rank import Benchmark, main
from harness.records import Summary, best_peer, over_ranks, verdict
from training_cases import Case
from training_measures import compare
from training_sides import sides_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["summarise"]

#: Relative differences that rounding explains: in mean losses, in gradient norms over the first
#: steps, and in decoder outputs. Sums differ by order, and steps amplify that.
LOSS_BOUND: Final = 2e-2
NORM_BOUND: Final = 5e-2
#: Steps whose gradients are compared.
NORMS: Final = 2
OUTPUT_BOUND: Final = 5e-2


def with_sides(sides_of: Callable[[Context], dict[str, list[Any]]], *arguments: Any) -> Context:
    """A rank's state, with sides and the group over Weft."""
    context = Context(*arguments)
    context.sides = sides_of(context)
    # The backend's library may have to be built, for which no case has time; a failure is kept.
    context.attempt(lambda: context.group("weft"))
    return context


open_context: Final = partial(with_sides, sides_of)


def summarise(case: Case, ranks: list[dict[str, Any]]) -> Summary:
    """Result, status and reason, from every rank's results."""
    if "skipped" in ranks[0]:
        return None, "skipped", ranks[0]["skipped"]
    sides = over_ranks(ranks, add_facts)
    judge(sides)
    result = {"sides": sides} | best_peer(sides, "weft", lambda name: name.startswith("weft"))
    weft = sides["weft"]
    return verdict(result, "ok" if weft["status"] == "ok" else "failed", weft["reason"])


def add_facts(side: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Add losses or an error, not yet compared, to a side."""
    first = ranks[0]
    if "error" in first:
        side["error"] = float(np.max([rank["error"] for rank in ranks]))
        return
    squares = np.array([rank["squares"] for rank in ranks])
    is_replica = first["digest"] is not None
    side |= {
        "losses": np.mean([rank["losses"] for rank in ranks], axis=0).tolist(),
        "last_loss": float(np.mean([rank["last_loss"] for rank in ranks])),
        # A replica has the whole gradient, a shard its part.
        "gradient_norms": np.sqrt(squares[0] if is_replica else squares.sum(axis=0)).tolist(),
        "replicas_equal": len({rank["digest"] for rank in ranks}) == 1 if is_replica else None,
    }


def judge(sides: dict[str, dict[str, Any]]) -> None:
    """Set `wrong` for sides whose results differ from the reference.

    The reference for losses and gradients is the first other library, if one ran.
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


BENCHMARK: Final = Benchmark("gpu-training", Case.from_json, open_context, compare, summarise)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
