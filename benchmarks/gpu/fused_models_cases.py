"""Cases for the benchmark that runs models with fused operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import training_cases
from harness.cases import indivisible
from training_cases import DECODERS, decoding

__all__ = ["CASES", "Case", "tiny"]

#: Tokens over all ranks in compiled layers, by kind; and layer count.
COMPILED: Final = {"compile decode": (4, 2), "compile prefill": (4096, 1)}
#: Ranking model in DLRM's shape: tables per rank, indices per bag, samples over all ranks, layer
#: sizes in both networks.
RANKING: Final = {
    "tables": 32,
    "rows": 1_000_000,
    "dim": 128,
    "pooling": 10,
    "batch": 16384,
    "bottom": [13, 512, 256, 128],
    "top": [1024, 1024, 512, 256, 1],
}
#: Shapes by model for the twin, and for a short GPU test.
TINY: Final[dict[str, dict[str, Any]]] = {
    "decoder": training_cases.TINY["decoder"]
    | {"hidden": 64, "inner": 128, "head": 16, "kv_heads": 2, "layers": 1},
    "ranking": {
        "tables": 2,
        "rows": 40,
        "dim": 8,
        "pooling": 2,
        "batch": 8,
        "bottom": [4, 16, 8],
        "top": [16, 1],
    },
}


@dataclass(frozen=True)
class Case(training_cases.Case):
    """A model's steps on all sides in turn.

    `kind` is "decode", "compile decode", "compile prefill", "forward" or "train"; `model` "decoder"
    or "ranking".
    """

    def unable(self, ranks: int) -> str | None:
        """Reason why this many ranks cannot run it; None if they can."""
        multiples = {"batch": ranks}
        if self.model == "decoder":
            multiples = {"kv_heads": ranks, "inner": 8 * ranks}
        if self.kind == "compile prefill":
            multiples["tokens"] = ranks
        return indivisible(self.shape, ranks, multiples)


def compiled(kind: str, hidden: int) -> Case:
    """Case with compiled layers."""
    tokens, layers = COMPILED[kind]
    cache = 1024 if kind == "compile decode" else 1
    shape = DECODERS[hidden] | {"tokens": tokens, "layers": layers, "cache": cache}
    return Case(f"{kind} {hidden}", kind, "decoder", shape, steps=15, seconds=12.0, limit=150.0)


def ranking(kind: str) -> Case:
    """Ranking model case."""
    return Case(f"dlrm {kind}", kind, "ranking", dict(RANKING), steps=8, seconds=6.0, limit=90.0)


#: Run order: the most important first.
CASES: Final = (
    *decoding(Case, limit=90.0),
    compiled("compile prefill", 4096),
    ranking("forward"),
    ranking("train"),
    compiled("compile decode", 4096),
    compiled("compile prefill", 8192),
    compiled("compile decode", 8192),
)


def tiny(cases: list[Case]) -> list[Case]:
    """The same cases with small shapes and few steps."""
    few: dict[str, Any] = {"blocks": 2, "steps": 1, "checked": 1, "seconds": 1.0}
    return [replace(case, shape=small(case), **few) for case in cases]


def small(case: Case) -> dict[str, Any]:
    """A small shape."""
    shape = case.shape | TINY[case.model]
    if case.kind == "compile prefill":
        shape |= {"tokens": 64, "cache": 1}
    return shape
