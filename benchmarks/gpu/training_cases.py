"""Cases for the GPU training and decoding benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import harness.cases

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CASES", "Case", "tiny"]

#: ResNet-50, as in "Deep Residual Learning for Image Recognition" (He et al., 2015).
RESNET: Final = {"width": 64, "blocks": [3, 4, 6, 3], "classes": 1000, "pixels": 224, "batch": 64}
#: Encoder in BERT-large's shape; `predicted` tokens in each sequence have a loss.
BERT: Final = {
    "layers": 24,
    "hidden": 1024,
    "heads": 16,
    "inner": 4096,
    "vocabulary": 30522,
    "sequence": 128,
    "predicted": 20,
    "batch": 16,
}
#: Layers in the shapes of Llama 3 8B and 70B, by hidden size.
DECODERS: Final = {
    4096: {"hidden": 4096, "inner": 14336, "head": 128, "kv_heads": 8},
    8192: {"hidden": 8192, "inner": 28672, "head": 128, "kv_heads": 8},
}
TOKENS: Final = (1, 4, 16)
#: Shapes by model for the twin, where a CPU computes, and for a short GPU test.
TINY: Final[dict[str, dict[str, Any]]] = {
    "resnet50": {"width": 8, "blocks": [1, 1, 1, 1], "classes": 10, "pixels": 32, "batch": 4},
    "bert": {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "inner": 128,
        "vocabulary": 100,
        "sequence": 16,
        "predicted": 4,
        "batch": 2,
    },
    "decoder": {
        "hidden": 256,
        "inner": 512,
        "head": 32,
        "kv_heads": 4,
        "layers": 2,
        "cache": 32,
    },
}


@dataclass(frozen=True)
class Case(harness.cases.Case):
    """A model's steps with one method ("ddp", "fsdp2" or "decode"), on all sides in turn."""

    #: Key in `TINY`.
    model: str
    #: Model sizes and a rank's batch size.
    shape: dict[str, Any]
    #: Timed step blocks per side, between which the other sides have theirs.
    blocks: int = 4
    #: Timed steps per block; one untimed step comes before them.
    steps: int = 5
    #: Steps before the measurement; these losses and gradients are compared.
    checked: int = 6
    #: Estimate, to skip a case for which too little time is left, and time limit; in seconds.
    seconds: float = 12.0
    limit: float = 45.0

    def unable(self, ranks: int) -> str | None:
        """Reason why this many ranks cannot run it; None if they can."""
        if self.kind == "decode" and self.shape["kv_heads"] % ranks:
            heads = self.shape["kv_heads"]
            return f"{ranks} ranks: expected a divisor of the {heads} heads of keys and values"
        return None


def decoding(make: type[Case], limit: float) -> Iterator[Any]:
    """Decoder cases with eager layers in a graph, for some sequences with a token each."""
    for hidden, tokens in product(DECODERS, TOKENS):
        shape = DECODERS[hidden] | {"tokens": tokens, "layers": 8, "cache": 1024}
        name = f"decode {hidden} {tokens}"
        yield make(name, "decode", "decoder", shape, steps=25, seconds=4.0, limit=limit)


CASES: Final = (
    Case("resnet50 ddp", "ddp", "resnet50", RESNET),
    Case("bert ddp", "ddp", "bert", BERT),
    *decoding(Case, limit=40.0),
    Case("bert fsdp2", "fsdp2", "bert", BERT),
)


def tiny(cases: list[Case]) -> list[Case]:
    """The same cases with small shapes and few steps."""
    return [
        replace(case, shape=case.shape | TINY[case.model], blocks=2, steps=2, seconds=1.0)
        for case in cases
    ]
