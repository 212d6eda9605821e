"""One rank of the benchmark of models with fused operators: its state, and results of a case."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import training_context
from fused_measures import POISONED
from fused_models_cases import Case
from fused_models_compiled import Compiling, Stack
from fused_models_decode import Normed, NormedDecoding
from fused_models_ranking import Ranking, RankingSteps
from fused_models_sides import sides_of
from serving import Benchmark, figure, serve
from training_measures import PROGRAMS, compare
from training_rank import judge, side_of

from weft.bench.group import worker

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Context", "measure", "summarise"]

#: Limit of waits of fused kernels, in seconds.
DEVICE_SECONDS: Final = 10.0
#: By kind of case: what all sides share, and the steps of a side with it.
STEPS: Final[dict[str, Any]] = {
    "decode": (Normed, NormedDecoding),
    "compile decode": (Stack, Compiling),
    "compile prefill": (Stack, Compiling),
    "forward": (Ranking, RankingSteps),
    "train": (Ranking, RankingSteps),
}
#: Facts of a side that are recorded as they are.
KEPT: Final = ("errors", "report", "no_graph")


class Context(training_context.Context):
    """A rank."""

    @property
    def fused(self) -> Any:
        """`weft.fused`, with the limit of waits of this benchmark."""
        return self.once("fused", self._import)

    def _import(self) -> Any:
        fused: Any = import_module("weft.fused")
        fused.set_timeout(DEVICE_SECONDS)
        return fused


def open_context(*arguments: Any) -> Context:
    """State of a rank, with its sides."""
    context = Context(*arguments)
    if context.device.kind == "twin":
        # The interpreter of Triton rounds bfloat16 otherwise.
        context.dtype = context.device.torch.float16
    context.sides = sides_of(context)
    # The backend's library may have to be built, for which no case has time; a failure is kept.
    context.attempt(lambda: context.group("weft"))
    return context


def measure(context: Context, case: Case) -> dict[str, Any]:
    """Times and results of every side on this rank; ends the ranks if Weft is unusable since."""
    PROGRAMS.update(STEPS)
    found: dict[str, Any] = compare(context, case)
    for name, side in found["sides"].items():
        reason = side["reason"] or ""
        is_known = reason == context.task["excluded"].get(f"{case.name}: {name}")
        if not is_known and any(error in reason for error in POISONED):
            # The ranks are started anew without this side.
            context.under_way(case.name, name)
            raise RuntimeError(f"{name}: {reason}")
    return found


def summarise(
    case: Case, ranks: list[dict[str, Any]]
) -> tuple[dict[str, Any] | None, str, str | None]:
    """Result, status and reason, of the results of every rank.

    Returns:
        `fused` of a result is the fastest fused side, `best_peer` the fastest of the others, and
        `of_best_peer` the time of the former over that of the latter.
    """
    if "skipped" in ranks[0]:
        return None, "skipped", ranks[0]["skipped"]
    sides = {}
    for name, first in ranks[0]["sides"].items():
        sides[name] = side_of([rank["sides"][name] for rank in ranks])
        sides[name] |= {key: first[key] for key in KEPT if key in first}
    judge(sides)
    times = {name: us for name, side in sides.items() if (us := figure(side))}
    fused = min(filter(is_fused, times), key=times.__getitem__, default=None)
    best = min((name for name in times if not is_fused(name)), key=times.__getitem__, default=None)
    result = {
        "sides": sides,
        "fused": fused,
        "best_peer": best,
        "of_best_peer": times[fused] / times[best] if fused and best else None,
    }
    wrong = [name for name, side in sides.items() if side["status"] == "wrong"]
    result["wrong"] = len(wrong)
    if wrong:
        reasons = (f"{name}: {sides[name]['reason']}" for name in wrong)
        return result, "wrong", "; ".join(reasons)
    if fused is None:
        return result, "failed", next(side["reason"] for side in sides.values())
    return result, "ok", None


def is_fused(name: str) -> bool:
    """True for a side with operators of weft.fused."""
    return name.startswith("weft fused") or name.endswith("pass on")


def work(directory: Path, task: dict[str, Any]) -> None:
    """Measure every case that there is time for."""
    benchmark = Benchmark("gpu-fused-models", Case.from_json, open_context, measure, summarise)
    serve(directory, task, benchmark)


if __name__ == "__main__":
    sys.exit(worker(work))
