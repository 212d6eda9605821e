"""Shapes of an all-to-all and batches for it, random but seeded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
PATHS = ("packets", "latency", "bandwidth")
ROUTINGS = ("uniform", "zipf", "incast", "masked", "same", "nothing")


@dataclass(frozen=True)
class Shape:
    """What all ranks agree on: the arguments of the native class, and how many ranks there are."""

    ranks: int = 2
    experts: int = 8
    top_k: int = 2
    hidden: int = 64
    max_tokens: int = 16
    token_dtype: str = "bfloat16"
    wire_dtype: str | None = None
    #: Their dtype and the elements of a block, if what travels has scales.
    scales: tuple[str, int] | None = None
    combine_dtype: str = "bfloat16"
    answer_dtype: str | None = None
    output_dtype: str | None = None
    ids_dtype: str = "int64"
    layout: str = "contiguous"
    pad_to: int = 1
    expert_capacity: int | None = None
    max_positions: int | None = None
    weighting: str = "combine"
    buffers: int = 2
    path: str | None = None

    @property
    def wire(self) -> str:
        """The dtype that travels."""
        return self.wire_dtype or self.token_dtype

    @property
    def answer(self) -> str:
        return self.answer_dtype or self.combine_dtype

    @property
    def output(self) -> str:
        return self.output_dtype or self.combine_dtype

    @property
    def cast(self) -> bool:
        """Whether tokens become 8-bit floats on their way out."""
        return self.wire != self.token_dtype

    @property
    def scale_count(self) -> int:
        """Scales of a token."""
        return -(-self.hidden // self.scales[1]) if self.scales else 0

    @property
    def local_experts(self) -> int:
        """The most experts of any rank."""
        return -(-self.experts // self.ranks)

    @property
    def row_scales_at(self) -> int:
        """Where a token's scales lie in a row that has landed, in bytes."""
        return -(-self.hidden * BYTES[self.wire] // 16) * 16

    @property
    def capacity(self) -> int:
        """Tokens that one expert has room for, in the padded layout."""
        return min(
            self.expert_capacity or self.ranks * self.max_tokens, self.ranks * self.max_tokens
        )

    @property
    def limited(self) -> bool:
        """Whether there may be less room than tokens for it."""
        return self.max_positions is not None or self.expert_capacity is not None

    def experts_of(self, rank: int) -> range:
        return range(rank * self.experts // self.ranks, (rank + 1) * self.experts // self.ranks)

    def owner(self, expert: NDArray[np.int64]) -> NDArray[np.int64]:
        return ((expert + 1) * self.ranks - 1) // self.experts

    def options(self) -> dict[str, Any]:
        """The arguments of the native class, but for what the machine decides."""
        return {
            "experts": self.experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "max_tokens": self.max_tokens,
            "token_dtype": self.token_dtype,
            "wire_dtype": self.wire,
            "scales": self.scales,
            "combine_dtype": self.combine_dtype,
            "answer_dtype": self.answer,
            "output_dtype": self.output,
            "ids_dtype": self.ids_dtype,
            "layout": self.layout,
            "pad_to": self.pad_to,
            "expert_capacity": self.expert_capacity,
            "max_positions": self.max_positions,
            "weighting": self.weighting,
            "buffers": self.buffers,
            "path": self.path,
        }


@dataclass
class Batch:
    """What one rank dispatches, in CPU memory.

    Attributes:
        given: rows of `tokens`.
        count: tokens that exist, as the device reads it; may be more than `given`. `None`: not
            said, all of them exist.
        scales: of tokens that are given as 8-bit floats, float32 or, in bytes, e8m0.
        factors: `[positions]` what this rank's experts multiply by, at each position.
    """

    given: int
    count: int | None
    tokens: torch.Tensor
    scales: torch.Tensor | None
    ids: NDArray[np.int64]
    weights: NDArray[np.float32] | None
    factors: torch.Tensor

    @property
    def tokens_that_exist(self) -> int:
        return self.given if self.count is None else min(self.count, self.given)


class Result(NamedTuple):
    """What came of a round at one rank, every byte of it, in CPU memory.

    Arrays are uint8 or int32, so that they compare bit by bit. What was not written is `UNWRITTEN`.
    """

    tokens: torch.Tensor
    scales: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor
    combined: torch.Tensor
    error: str | None


#: What fills outputs before a call: no poison of the kernels', so it shows what they did not write.
UNWRITTEN = 0xA5
#: What fills the result of a round that failed: no number in any type.
POISON = 0xFF


@dataclass
class Chance:
    """Draws shapes and batches."""

    seed: int
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def one_of(self, *choices: Any) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def shape(self, elements: int = 1 << 23) -> Shape:
        """Any shape; `elements`: about how many tokens' elements all ranks may have room for."""
        ranks = int(self.random.integers(1, 9))
        experts = self.one_of(1, 2, 3, 7, ranks, 2 * ranks, 4 * ranks + 1, 32, 64, 160, 256)
        local = -(-experts // ranks)
        top_k = self.one_of(1, 2, 3, 4, 6, 8)
        dtypes = self.dtypes()
        hidden = self.hidden(dtypes)
        path = self.one_of(*PATHS)
        most = {"packets": self.one_of(8, 8, 40), "latency": 1024, "bandwidth": 3000}[path]
        if path != "bandwidth":
            most = min(most, 8192 // top_k)
        layout = self.one_of("contiguous", "contiguous", "indexed", "padded")
        copies = local if layout == "padded" else min(top_k, local)
        most = min(most, elements // (ranks * ranks * copies * hidden))
        tokens = 1 + int(most * self.random.random() ** 2)
        if path == "packets" and layout == "indexed":
            path = "latency"
        forced = None if self.chosen(tokens, top_k, layout) == path else path
        return Shape(
            ranks=ranks,
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens=tokens,
            ids_dtype=self.one_of("int64", "int32"),
            weighting=self.one_of("combine", "combine", "expert"),
            buffers=self.one_of(1, 2, 3),
            path=forced,
            **dtypes,
            **self.layout(layout, ranks * tokens, local),
        )

    def hidden(self, dtypes: dict[str, Any]) -> int:
        """A length of which rows in each of `dtypes` are whole pieces of 16 bytes."""
        named = [name for name in dtypes.values() if isinstance(name, str)]
        piece = 16 // min(BYTES[name] for name in named)
        usual = self.one_of(128, 256, 512, 1024, 2048, 2880, 4096, 7168)
        return int(self.one_of(usual, piece * int(self.random.integers(1, 80))))

    @staticmethod
    def chosen(tokens: int, top_k: int, layout: str) -> str:
        """The path that a shape takes by itself."""
        if tokens <= 8 and layout != "indexed":
            return "packets"
        return "latency" if tokens <= 1024 and tokens * top_k <= 8192 else "bandwidth"

    def dtypes(self) -> dict[str, Any]:
        wide = ("float32", "bfloat16", "float16")
        kind = self.one_of("plain", "plain", "cast", "cast", "given")
        scales = (self.one_of("float32", "float8_e8m0fnu"), self.one_of(32, 64, 128, 256))
        token = (
            self.one_of(*wide) if kind != "given" else self.one_of("float8_e4m3fn", "float8_e5m2")
        )
        combine = self.one_of("bfloat16", *wide)
        return {
            "token_dtype": token,
            "wire_dtype": "float8_e4m3fn" if kind == "cast" else None,
            "scales": None if kind == "plain" else scales,
            "combine_dtype": combine,
            "answer_dtype": self.one_of(None, None, *wide),
            "output_dtype": self.one_of(None, None, *wide),
        }

    def layout(self, layout: str, rows: int, local: int) -> dict[str, Any]:
        """What goes with a layout; now and then less room than `rows` rows for a rank need."""
        tight = int(self.random.integers(6)) == 0
        if layout == "padded":
            capacity = max(1, rows // 2) if tight else self.one_of(None, rows)
            return {"layout": layout, "expert_capacity": capacity}
        pad_to = self.one_of(1, 1, 8, 16, 128) if layout == "contiguous" else 1
        room = max(1, rows // 2) + local * (pad_to - 1) if tight else None
        return {"layout": layout, "pad_to": pad_to, "max_positions": room}

    def batches(self, shape: Shape, positions: int) -> list[Batch]:
        """A batch for each rank; `positions` is how many each has room for."""
        alone = int(self.random.integers(shape.ranks))
        quiet = self.one_of(False, False, True)
        hot = int(self.random.integers(shape.experts))
        routing = self.one_of(*ROUTINGS)
        return [
            self.batch(shape, positions, routing, hot, none=quiet and rank != alone)
            for rank in range(shape.ranks)
        ]

    def batch(
        self, shape: Shape, positions: int, routing: str, hot: int = 0, *, none: bool = False
    ) -> Batch:
        """One rank's batch.

        Args:
            shape: of the group.
            positions: as in `batches`.
            routing: one of `ROUTINGS`.
            hot: an expert of the rank to which `incast` sends everything.
            none: no tokens at all.
        """
        most = shape.max_tokens
        given = (
            0
            if none
            else self.one_of(most, most, min(1, most), int(self.random.integers(most + 1)))
        )
        count = self.one_of(None, given, given + 5, int(self.random.integers(given + 1)))
        weights = None
        if self.one_of(True, True, False):
            weights = self.random.standard_normal((given, shape.top_k), dtype=np.float32)
        factors = self.random.standard_normal(positions, dtype=np.float32)
        return Batch(
            given=given,
            count=count,
            tokens=self.tokens(shape, given),
            scales=self.scales(shape, given),
            ids=self.ids(shape, given, routing, hot),
            weights=weights,
            factors=torch.from_numpy(factors),
        )

    def tokens(self, shape: Shape, count: int) -> torch.Tensor:
        """`[count, hidden]`: any bits if they are only carried, and mostly numbers if cast."""
        tokens = torch.empty(count, shape.hidden, dtype=getattr(torch, shape.token_dtype))
        if not shape.cast:
            bits = tokens.view(torch.uint8)
            bits.copy_(torch.from_numpy(self.random.integers(0, 256, bits.shape, dtype=np.uint8)))
            return tokens
        values = self.random.standard_normal((count, shape.hidden), dtype=np.float32)
        values *= 2.0 ** self.random.integers(-12, 12, (count, 1)).astype(np.float32)
        for special in (0.0, np.inf, -np.inf, np.nan, 1e-38, -3e38):
            # One in about two rows, each.
            often = 0.5 / shape.hidden
            values[self.random.random(values.shape) < often] = special
        if count:
            values[int(self.random.integers(count))] = 0
        return tokens.copy_(torch.from_numpy(values))

    def scales(self, shape: Shape, count: int) -> torch.Tensor | None:
        if shape.cast or shape.scales is None:
            return None
        width = shape.scale_count * (4 if shape.scales[0] == "float32" else 1)
        return torch.from_numpy(self.random.integers(0, 256, (count, width), dtype=np.uint8))

    def ids(self, shape: Shape, count: int, routing: str, hot: int) -> NDArray[np.int64]:
        """`[count, top_k]`, each expert named at most once by a token; -1: none."""
        ids = np.full((count, shape.top_k), -1, dtype=np.int64)
        if routing == "nothing":
            return ids
        named = np.arange(shape.experts)
        if routing == "incast":
            owner = int(shape.owner(np.array([hot]))[0])
            named = np.array(shape.experts_of(owner))
        # The largest of random keys: draws without replacement; heavier ones for low numbers.
        keys = self.random.gumbel(size=(1 if routing == "same" else count, len(named)))
        if routing == "zipf":
            keys -= 1.2 * np.log(1 + np.arange(len(named)))
        chosen = named[np.argsort(-keys, axis=1)[:, : shape.top_k]]
        ids[:, : chosen.shape[1]] = chosen
        if routing in ("masked", "incast"):
            ids[self.random.random(ids.shape) < 0.3] = -1
            ids = self.random.permuted(ids, axis=1)
        return ids
