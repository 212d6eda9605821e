"""Cases of the benchmark of training and decoding on GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

__all__ = ["CASES", "Case", "tiny"]

#: ResNet-50, as in "Deep Residual Learning for Image Recognition" (He et al., 2015).
RESNET: Final = {"width": 64, "blocks": [3, 4, 6, 3], "classes": 1000, "pixels": 224, "batch": 64}
#: Encoder of the shape of BERT-large; `predicted` tokens of each sequence have a loss.
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
#: Layers of the shapes of Llama 3 8B and 70B, by hidden size.
DECODERS: Final = {
    4096: {"hidden": 4096, "inner": 14336, "head": 128, "kv_heads": 8},
    8192: {"hidden": 8192, "inner": 28672, "head": 128, "kv_heads": 8},
}
TOKENS: Final = (1, 4, 16)
#: Shapes by model for the twin, where a CPU computes, and for a short test of a GPU.
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
class Case:
    """Steps of a model by one method, on all sides in turn."""

    name: str
    #: "ddp", "fsdp2" or "decode".
    kind: str
    #: Key of `TINY`.
    model: str
    #: Sizes of the model and of a rank's batch.
    shape: dict[str, Any]
    #: Blocks of timed steps of a side, between which the other sides have theirs.
    blocks: int = 4
    #: Timed steps of a block; one without a time comes before them.
    steps: int = 5
    #: Steps before the measurement; losses and gradients of them are compared.
    checked: int = 6
    #: Estimate, to skip a case for which too little time is left, and time limit; in seconds.
    seconds: float = 12.0
    limit: float = 45.0

    def unable(self, ranks: int) -> str | None:
        """Reason for which this number of ranks cannot run it; None if it can."""
        if self.kind == "decode" and self.shape["kv_heads"] % ranks:
            heads = self.shape["kv_heads"]
            return f"{ranks} ranks: expected a divisor of the {heads} heads of keys and values"
        return None

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """The inverse of `to_json`."""
        return cls(**fields)


def decode(hidden: int, tokens: int) -> Case:
    """Case of a decoder, for that many sequences of a token each."""
    shape = DECODERS[hidden] | {"tokens": tokens, "layers": 8, "cache": 1024}
    name = f"decode {hidden} {tokens}"
    return Case(name, "decode", "decoder", shape, steps=25, seconds=4.0, limit=40.0)


CASES: Final = (
    Case("resnet50 ddp", "ddp", "resnet50", RESNET),
    Case("bert ddp", "ddp", "bert", BERT),
    *(decode(hidden, tokens) for hidden in DECODERS for tokens in TOKENS),
    Case("bert fsdp2", "fsdp2", "bert", BERT),
)


def tiny(cases: list[Case]) -> list[Case]:
    """The same cases with small shapes and few steps."""
    return [
        replace(case, shape=case.shape | TINY[case.model], blocks=2, steps=2, seconds=1.0)
        for case in cases
    ]
