"""Cases of the benchmark of models with fused operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import training_cases
from training_cases import DECODERS, TOKENS

__all__ = ["CASES", "Case", "tiny"]

#: Tokens of all ranks in compiled layers, by kind; layers of them.
COMPILED: Final = {"compile decode": (4, 2), "compile prefill": (4096, 1)}
#: Ranking model of the shape of DLRM: tables of a rank, indices of a bag, samples of all ranks,
#: sizes of the layers of both networks.
RANKING: Final = {
    "tables": 32,
    "rows": 1_000_000,
    "dim": 128,
    "pooling": 10,
    "batch": 16384,
    "bottom": [13, 512, 256, 128],
    "top": [1024, 1024, 512, 256, 1],
}
#: Shapes by model for the twin, and for a short test of a GPU.
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
    """Steps of a model on all sides in turn.

    `kind` is "decode", "compile decode", "compile prefill", "forward" or "train"; `model`
    "decoder" or "ranking".
    """

    def unable(self, ranks: int) -> str | None:
        """Reason for which this number of ranks cannot run it; None if it can."""
        multiples = {"batch": ranks}
        if self.model == "decoder":
            multiples = {"kv_heads": ranks, "inner": 8 * ranks}
        if self.kind == "compile prefill":
            multiples["tokens"] = ranks
        for name, multiple in multiples.items():
            if self.shape[name] % multiple:
                return (
                    f"{ranks} ranks: expected {name} {self.shape[name]} as a multiple of {multiple}"
                )
        return None


def decode(hidden: int, tokens: int) -> Case:
    """Case of eager layers in a graph, for that many sequences of a token each."""
    shape = DECODERS[hidden] | {"tokens": tokens, "layers": 8, "cache": 1024}
    name = f"decode {hidden} {tokens}"
    return Case(name, "decode", "decoder", shape, steps=25, seconds=4.0, limit=90.0)


def compiled(kind: str, hidden: int) -> Case:
    """Case of compiled layers."""
    tokens, layers = COMPILED[kind]
    cache = 1024 if kind == "compile decode" else 1
    shape = DECODERS[hidden] | {"tokens": tokens, "layers": layers, "cache": cache}
    return Case(f"{kind} {hidden}", kind, "decoder", shape, steps=15, seconds=12.0, limit=150.0)


def ranking(kind: str) -> Case:
    """Case of the ranking model."""
    return Case(f"dlrm {kind}", kind, "ranking", dict(RANKING), steps=8, seconds=6.0, limit=90.0)


#: The order is that of the run: the most important first.
CASES: Final = (
    *(decode(hidden, tokens) for hidden in DECODERS for tokens in TOKENS),
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
