"""One rank in the benchmark that runs models with fused operators: state, and a case's results."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import training_rank
from fused_models_cases import Case
from fused_models_compiled import Compiling, Stack
from fused_models_decode import Normed, NormedDecoding
from fused_models_ranking import Ranking, RankingSteps
from fused_models_sides import sides_of
from harness.measure import is_poisoned
from harness.rank import Benchmark, main
from harness.records import Summary, best_peer, figures, over_ranks, verdict
from training_measures import PROGRAMS, compare
from training_rank import judge, with_sides

if TYPE_CHECKING:
    from harness.context import Context

__all__ = ["measure", "summarise"]

#: By case kind: what all sides share, and a side's steps with it.
STEPS: Final[dict[str, Any]] = {
    "decode": (Normed, NormedDecoding),
    "compile decode": (Stack, Compiling),
    "compile prefill": (Stack, Compiling),
    "forward": (Ranking, RankingSteps),
    "train": (Ranking, RankingSteps),
}
#: Facts from a side that are recorded unchanged.
KEPT: Final = ("errors", "report", "no_graph")


def open_context(*arguments: Any) -> Context:
    """A rank's state, with sides."""
    context = with_sides(sides_of, *arguments)
    context.use_triton()
    return context


def measure(context: Context, case: Case) -> dict[str, Any]:
    """Times and results for every side on this rank; ends the ranks if Weft is unusable since."""
    PROGRAMS.update(STEPS)
    found: dict[str, Any] = compare(context, case)
    for name, side in found["sides"].items():
        reason = side["reason"] or ""
        is_known = reason == context.task["excluded"].get(f"{case.name}: {name}")
        if not is_known and is_poisoned(reason):
            # The ranks are started anew without this side.
            context.under_way(case.name, name)
            raise RuntimeError(f"{name}: {reason}")
    return found


def summarise(case: Case, ranks: list[dict[str, Any]]) -> Summary:
    """Result, status and reason, from every rank's results.

    Returns:
        In a result, `fused` is the fastest fused side, `best_peer` the fastest other side, and
        `of_best_peer` the former's time over the latter's.
    """
    if "skipped" in ranks[0]:
        return None, "skipped", ranks[0]["skipped"]
    sides = over_ranks(ranks, add_facts)
    judge(sides)
    times = figures(sides)
    fused = min(filter(is_fused, times), key=times.__getitem__, default=None)
    result = {"sides": sides, "fused": fused} | best_peer(sides, fused, is_fused)
    if fused is None:
        return verdict(result, "failed", next(side["reason"] for side in sides.values()))
    return verdict(result, "ok", None)


def add_facts(side: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Add an error and reports, not yet compared, to a side."""
    training_rank.add_facts(side, ranks)
    side |= {key: ranks[0][key] for key in KEPT if key in ranks[0]}


def is_fused(name: str) -> bool:
    """True for a side with weft.fused operators."""
    return name.startswith("weft fused") or name.endswith("pass on")


BENCHMARK: Final = Benchmark("gpu-fused-models", Case.from_json, open_context, measure, summarise)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
