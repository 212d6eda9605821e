"""Seeded random all-to-all shapes, and batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from weft.moe import Placement

if TYPE_CHECKING:
    from numpy.typing import NDArray

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
PATHS = ("packets", "latency", "bandwidth")
ROUTINGS = ("uniform", "zipf", "incast", "masked", "same", "empty")


@dataclass(frozen=True)
class Shape:
    """Shape common to all ranks: arguments for the native class, and the rank count."""

    ranks: int = 2
    experts: int = 8
    top_k: int = 2
    hidden: int = 64
    max_tokens: int = 16
    token_dtype: str = "bfloat16"
    wire_dtype: str | None = None
    #: Scale dtype and elements in a block, if tokens on the wire have scales.
    scales: tuple[str, int] | None = None
    combine_dtype: str = "bfloat16"
    reply_dtype: str | None = None
    output_dtype: str | None = None
    ids_dtype: str = "int64"
    layout: str = "contiguous"
    pad_to: int = 1
    expert_capacity: int | None = None
    max_positions: int | None = None
    scale_layout: str = "row"
    weighting: str = "combine"
    channels: int = 2
    path: str | None = None
    #: Each rank's experts for each layer, if there are replicas; rounds use the last layer.
    placement: tuple[Placement, ...] = ()

    @property
    def layer(self) -> int:
        return max(0, len(self.placement) - 1)

    @cached_property
    def placed(self) -> Placement:
        """Each rank's experts."""
        even = Placement.even(self.experts, self.ranks)
        return self.placement[-1] if self.placement else even

    @property
    def wire(self) -> str:
        """Dtype on the wire."""
        return self.wire_dtype or self.token_dtype

    @property
    def answer(self) -> str:
        return self.reply_dtype or self.combine_dtype

    @property
    def output(self) -> str:
        return self.output_dtype or self.combine_dtype

    @property
    def cast(self) -> bool:
        """True if dispatch casts tokens to 8-bit floats."""
        return self.wire != self.token_dtype

    @property
    def scale_count(self) -> int:
        """Scale count for a token."""
        return -(-self.hidden // self.scales[1]) if self.scales else 0

    @property
    def local_experts(self) -> int:
        """Maximum experts on a rank."""
        return max(self.placed.slots)

    @property
    def row_scales_at(self) -> int:
        """A token's scale offset in bytes in a received row."""
        return -(-self.hidden * BYTES[self.wire] // 16) * 16

    @property
    def capacity(self) -> int:
        """Expert capacity in tokens, in the padded layout."""
        return min(
            self.expert_capacity or self.ranks * self.max_tokens, self.ranks * self.max_tokens
        )

    def placed_scales(self, positions: int) -> tuple[int, int, int, int]:
        """Received scales in memory: groups, columns, rows of one in memory, element bytes.

        The rows in a group are contiguous, or in the column layouts its columns.
        """
        element = 4 if self.scales and self.scales[0] == "float32" else 1
        columns = self.scale_count
        if self.scale_layout == "row":
            return 1, columns, positions, element
        if self.scale_layout == "column_packed":
            element, columns = 4, -(-columns // 4)
        padded = self.layout == "padded"
        rows = self.capacity if padded else positions
        each = 16 // element
        return self.local_experts if padded else 1, columns, -(-rows // each) * each, element

    @property
    def limited(self) -> bool:
        """True if the capacity may be below the worst case."""
        return self.max_positions is not None or self.expert_capacity is not None

    def experts_of(self, rank: int) -> range:
        """A rank's physical experts."""
        slots = self.placed.slots
        return range(sum(slots[:rank]), sum(slots[: rank + 1]))

    def owner(self, expert: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ranks that hold the physical experts."""
        ends = np.cumsum(self.placed.slots)
        return np.searchsorted(ends, expert, side="right").astype(np.int64)

    def physical(self, ids: NDArray[np.int64], rank: int) -> NDArray[np.int64]:
        """A rank's token destinations: physical experts."""
        return self.placed.choose(ids, rank)

    def options(self) -> dict[str, Any]:
        """Arguments to the native class, without those that depend on the machine."""
        return {
            "experts": self.experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "max_tokens": self.max_tokens,
            "token_dtype": self.token_dtype,
            "wire_dtype": self.wire,
            "scales": self.scales,
            "combine_dtype": self.combine_dtype,
            "reply_dtype": self.answer,
            "output_dtype": self.output,
            "ids_dtype": self.ids_dtype,
            "layout": self.layout,
            "pad_to": self.pad_to,
            "expert_capacity": self.expert_capacity,
            "max_positions": self.max_positions,
            "scale_layout": self.scale_layout,
            "weighting": self.weighting,
            "channels": self.channels,
            "path": self.path,
            "placement": [layer.native for layer in self.placement],
        }


@dataclass
class Batch:
    """Input for one rank's dispatch, in CPU memory.

    Attributes:
        given: `tokens` rows.
        count: valid tokens, as the device reads it; may exceed `given`. `None`: absent, all
            tokens are valid.
        scales: scales for 8-bit tokens: float32 or, in bytes, e8m0.
        factors: `[positions]` factor for this rank's experts, at each position.
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
    """A round's outcome at one rank, all bytes, in CPU memory.

    Arrays are uint8 or int32, so that they compare bit by bit. Unwritten bytes are `UNWRITTEN`.
    """

    tokens: torch.Tensor
    scales: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor
    groups: torch.Tensor
    combined: torch.Tensor
    error: str | None


#: Output fill before a call; it differs from the kernels' poison and shows unwritten bytes.
UNWRITTEN = 0xA5
#: Result fill for a failed round: NaN in every type.
POISON = 0xFF


@dataclass
class Chance:
    """Generates random shapes and batches."""

    seed: int
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def one_of(self, *choices: Any) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def shape(self, elements: int = 1 << 23) -> Shape:
        """Random shape; `elements`: approximate limit for all ranks' token elements."""
        ranks = int(self.random.integers(1, 9))
        experts = self.one_of(1, 2, 3, 7, ranks, 2 * ranks, 4 * ranks + 1, 32, 64, 160, 256)
        placement = self.placement(experts, ranks)
        local = max(placement[-1].slots) if placement else -(-experts // ranks)
        top_k = self.one_of(1, 2, 3, 4, 6, 8)
        dtypes = self.dtypes()
        hidden = self.hidden(dtypes)
        path = self.one_of(*PATHS)
        most = {"packets": self.one_of(8, 8, 40), "latency": 1024, "bandwidth": 3000}[path]
        if path != "bandwidth":
            most = min(most, 8192 // top_k)
        layout = self.one_of("contiguous", "contiguous", "indexed", "padded", "dense")
        copies = {"padded": local, "dense": 1}.get(layout, min(top_k, local))
        most = min(most, elements // (ranks * ranks * copies * hidden))
        tokens = 1 + int(most * self.random.random() ** 2)
        if path == "packets" and layout == "indexed":
            path = "latency"
        weighting = self.one_of("combine", "combine", "expert")
        forced = None if self.chosen(tokens, top_k, layout) == path else path
        scale_layout = self.scale_layout(layout, dtypes["scales"])
        return Shape(
            ranks=ranks,
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens=tokens,
            ids_dtype=self.one_of("int64", "int32"),
            weighting="expert" if layout == "dense" else weighting,
            channels=self.one_of(1, 2, 3),
            path=forced,
            scale_layout=scale_layout,
            placement=placement,
            **dtypes,
            **self.layout(layout, ranks * tokens, local),
        )

    def scale_layout(self, layout: str, scales: tuple[str, int] | None) -> str:
        """Scale layout, drawn from a separate generator."""
        if scales is None or layout == "indexed":
            return "row"
        packed = ["column_packed"] if scales[0] != "float32" else []
        known = ["row", "column", *packed]
        return known[int(np.random.default_rng([self.seed, 1]).integers(len(known)))]

    def placement(self, experts: int, ranks: int) -> tuple[Placement, ...]:
        """Layers whose experts have replicas, on ranks with any number of them, for some seeds."""
        # A separate generator, so that seeds keep their other shapes.
        random = np.random.default_rng([self.seed, 15])
        if random.integers(3):
            return ()
        more = int(random.integers(2 * ranks + 1))
        held = np.concatenate([np.arange(experts), random.integers(0, experts, more)])
        ends = np.sort(random.integers(0, len(held) + 1, ranks - 1))
        layers = [random.permutation(held) for _ in range(int(random.integers(1, 4)))]
        return tuple(
            Placement([part.tolist() for part in np.split(layer, ends)], experts)
            for layer in layers
        )

    def hidden(self, dtypes: dict[str, Any]) -> int:
        """Length whose rows in each of `dtypes` fill whole 16-byte words."""
        named = [name for name in dtypes.values() if isinstance(name, str)]
        piece = 16 // min(BYTES[name] for name in named)
        usual = self.one_of(128, 256, 512, 1024, 2048, 2880, 4096, 7168)
        return int(self.one_of(usual, piece * int(self.random.integers(1, 80))))

    @staticmethod
    def chosen(tokens: int, top_k: int, layout: str) -> str:
        """A shape's default path."""
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
            "reply_dtype": self.one_of(None, None, *wide),
            "output_dtype": self.one_of(None, None, *wide),
        }

    def layout(self, layout: str, rows: int, local: int) -> dict[str, Any]:
        """A layout's options; for some seeds with less capacity than `rows` rows need."""
        tight = int(self.random.integers(6)) == 0
        if layout == "padded":
            capacity = max(1, rows // 2) if tight else self.one_of(None, rows)
            return {"layout": layout, "expert_capacity": capacity}
        pad_to = self.one_of(1, 1, 8, 16, 128) if layout == "contiguous" else 1
        room = max(1, rows // 2) + local * (pad_to - 1) if tight else None
        return {"layout": layout, "pad_to": pad_to, "max_positions": room}

    def batches(self, shape: Shape, positions: int) -> list[Batch]:
        """A batch for each rank; `positions`: each one's capacity."""
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
            shape: the group's.
            positions: as in `batches`.
            routing: one of `ROUTINGS`.
            hot: an expert on the rank to which `incast` sends everything.
            none: an empty batch.
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
        """`[count, hidden]`: arbitrary bits if only copied, mostly finite numbers if cast."""
        tokens = torch.empty(count, shape.hidden, dtype=getattr(torch, shape.token_dtype))
        if not shape.cast:
            bits = tokens.view(torch.uint8)
            bits.copy_(torch.from_numpy(self.random.integers(0, 256, bits.shape, dtype=np.uint8)))
            return tokens
        values = self.random.standard_normal((count, shape.hidden), dtype=np.float32)
        values *= 2.0 ** self.random.integers(-12, 12, (count, 1)).astype(np.float32)
        for special in (0.0, np.inf, -np.inf, np.nan, 1e-38, -3e38):
            # About one in two rows, each.
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
        """`[count, top_k]`, each expert at most once per token; -1: none."""
        ids = np.full((count, shape.top_k), -1, dtype=np.int64)
        if routing == "empty":
            return ids
        named = np.arange(shape.experts)
        if routing == "incast":
            owner = int(shape.owner(np.array([hot]))[0])
            named = np.unique(shape.placed.ranks[owner]).astype(np.int64)
        # Largest random keys: draws without replacement, weighted toward low numbers.
        keys = self.random.gumbel(size=(1 if routing == "same" else count, len(named)))
        if routing == "zipf":
            keys -= 1.2 * np.log(1 + np.arange(len(named)))
        chosen = named[np.argsort(-keys, axis=1)[:, : shape.top_k]]
        ids[:, : chosen.shape[1]] = chosen
        if routing in ("masked", "incast"):
            ids[self.random.random(ids.shape) < 0.3] = -1
            ids = self.random.permuted(ids, axis=1)
        return ids
