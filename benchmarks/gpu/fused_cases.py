"""Cases for the fused operator benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from typing import TYPE_CHECKING, Final

import harness.cases
from collectives_cases import Case as Exchange
from harness.cases import indivisible, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ABLATIONS", "CASES", "SCALED", "SYMMETRIC", "Case", "choose", "tiny"]

#: Bytes between two uses of the same weights: three times an H200's L2.
APART: Final = 150 << 20
#: Most ranks on one host: then a rank has the fewest weight bytes.
MOST_RANKS: Final = 8
#: Operators by the collective that does the same apart from the computation.
COLLECTIVES: Final = {
    "embedding_all_to_all": "all_to_all",
    "gemv_all_reduce": "all_reduce",
    "all_reduce_rms_norm": "all_reduce",
    "gemm_all_to_all": "all_to_all",
    "gemm_reduce_scatter": "reduce_scatter",
    "gemm_all_reduce": "all_reduce",
    "all_gather_gemm": "all_gather",
    "all_to_all_gemm": "all_to_all",
}
#: All-reduce algorithms for few tokens.
ALGORITHMS: Final = ("one_shot", "two_shot")
#: Operators that store into peers' symmetric outputs.
SYMMETRIC: Final = ("gemm_all_to_all", "gemm_all_reduce")
#: Operators whose collective comes before the computation.
GATHERED: Final = ("all_reduce_rms_norm", "all_gather_gemm", "all_to_all_gemm")

DIMENSIONS: Final = (128, 64, 256)
TABLES: Final = (8, 64)
BATCHES: Final = (4096, 16384, 512, 65536)
POOLINGS: Final = (10, 1, 4, 70)
#: Rows per table.
TABLE_ROWS: Final = 1_000_000
TOKENS: Final = (1, 4, 16)
#: Hidden and inner size over all ranks together, for the projections before an all-reduce.
PROJECTIONS: Final = {
    "70B down_proj": (8192, 28672),
    "8B o_proj": (4096, 4096),
    "70B o_proj": (8192, 8192),
    "8B down_proj": (4096, 14336),
}
NORM_TOKENS: Final = (32, 128, 1, 8, 64)
NORM_HIDDEN: Final = 8192
ROWS: Final = (4096, 1024, 16384, 128)
#: Columns and inner size over all ranks together, by operator and model. An expert is on one rank.
LAYERS: Final = {
    ("gemm_all_to_all", "deepseek-v3"): (7168, 2048),
    ("gemm_reduce_scatter", "llama-70b"): (8192, 28672),
    ("all_gather_gemm", "llama-70b"): (57344, 8192),
    ("gemm_all_reduce", "llama-70b"): (8192, 28672),
    ("gemm_all_to_all", "mixtral"): (4096, 14336),
    ("all_to_all_gemm", "deepseek-v3"): (4096, 7168),
    ("gemm_reduce_scatter", "mixtral"): (4096, 14336),
    ("all_gather_gemm", "mixtral"): (28672, 4096),
    ("gemm_all_reduce", "mixtral"): (4096, 14336),
    ("gemm_reduce_scatter", "deepseek-v3"): (7168, 18432),
    ("all_gather_gemm", "deepseek-v3"): (36864, 7168),
    ("gemm_all_reduce", "deepseek-v3"): (7168, 18432),
    ("all_to_all_gemm", "mixtral"): (28672, 4096),
}
#: Sizes that an ablation varies one at a time around the default tiling: task order, programs per
#: SM, and bags per task.
EMBEDDING_SIZES: Final = {
    "own_last": [8, 4, 1, -1],
    "programs": [1, 2, 3, 4, 6],
    "bags": [8, 16, 32, 64],
}
#: The same for GEMMs: SMs, bytes between signals, and tile rows per group.
GEMM_SIZES: Final = {
    "num_sms": [64, 96, 116, 132],
    "slice_bytes": [64 << 10, 256 << 10, 1 << 20, 4 << 20],
    "group": [1, 4, 8, 16],
}
#: SMs that send all-gather rows.
SENDERS: Final = [8, 16, 24, 32, 48]
#: 128x128 tiles.
SHORT: Final = {"columns": 128, "warps": 4, "programs": 2}
#: Twin sizes by operator; one value does not fit in each.
TINY_SIZES: Final[dict[str, dict[str, list[int]]]] = {
    "embedding_all_to_all": {"own_last": [-1, 1], "bags": [256]},
    "gemm_reduce_scatter": {"num_sms": [3, 64], "slice_bytes": [1024]},
    "gemm_all_to_all": {"group": [1], "num_sms": [64]},
    "all_gather_gemm": {"senders": [1], "num_sms": [64]},
}
#: Ablation cases, such as long bags and short ones, a large exchange, and Mixtral GEMMs.
ABLATED: Final = (
    "embedding 8x128 batch 4096 pooling 4",
    "gemm_reduce_scatter mixtral 4096",
    "embedding 8x128 batch 16384 pooling 10",
    "gemm_all_to_all deepseek-v3 4096",
    "embedding 64x128 batch 4096 pooling 10",
    "all_gather_gemm mixtral 4096",
    "embedding 8x256 batch 4096 pooling 1",
)
#: Tilings for GEMMs that send: ordinary, paced and bulk stores, by slice size.
STORES: Final[list[dict[str, int]]] = [
    {"slice_bytes": 64 << 10},
    {"paced_stores": True},
    {"paced_stores": True, "slice_bytes": 64 << 10},
    # Only for all-to-alls.
    {"bulk_stores": True, "stages": 3, "slice_bytes": 64 << 10},
    # Two programs per SM.
    SHORT | {"stages": 3},
    SHORT | {"stages": 3, "paced_stores": True},
]
#: Cases with these tilings.
STORED: Final = (
    "gemm_reduce_scatter mixtral 4096",
    "gemm_all_to_all deepseek-v3 4096",
    "gemm_all_reduce mixtral 4096",
    "gemm_reduce_scatter deepseek-v3 4096",
    "gemm_all_to_all deepseek-v3 16384",
    "gemm_reduce_scatter llama-70b 4096",
)
#: The same on the twin; the last does not fit.
TINY_STORES: Final[list[dict[str, int]]] = [
    {"stream_k": False, "rows": 16, "columns": 32, "inner": 16, "paced_stores": True},
    {"rows": 48},
]
#: Small shapes by computation, for the twin and for a short GPU test.
TINY: Final[dict[str, dict[str, int]]] = {
    "embedding": {"tables": 2, "dim": 8, "batch": 8, "pooling": 2, "rows": 50},
    "gemv": {"hidden": 64, "inner": 128, "tokens": 2},
    "gemv_norm": {"hidden": 64, "inner": 128, "tokens": 2},
    "norm": {"hidden": 64, "tokens": 4},
    "gemm": {"rows": 16, "columns": 64, "inner": 128},
    "scaled": {"rows": 16, "columns": 64, "inner": 128},
}


@dataclass(frozen=True)
class Case(harness.cases.Case):
    """One operator at one shape, by all sides in turn.

    `kind` is "embedding", "gemv", "gemv_norm", "norm", "gemm", "scaled" (float8 GEMMs), or
    "ablation" or "stores" on one of them.
    """

    #: Function in `weft.fused`: key in `COLLECTIVES`.
    operator: str
    #: Sizes over all ranks together; `tables` and `rows` in a GEMM all-to-all are per rank.
    shape: dict[str, int]
    #: Calls per graph, over as many buffers as `buffers` returns.
    calls: int = 10
    #: Fewest replays per side.
    replays: int = 20
    #: Estimate, to skip a case for which too little time is left, and time limit; in seconds.
    seconds: float = 5.0
    limit: float = 90.0
    #: For an ablation: tiling sizes that are varied one at a time, with values.
    sizes: dict[str, list[int]] = field(default_factory=dict)
    #: For a store comparison: tilings, by the fields that differ from the default's.
    tilings: list[dict[str, int]] = field(default_factory=list)

    @property
    def is_varied(self) -> bool:
        """True if the fused operator has several tilings, and other sides are left out."""
        return self.kind in ("ablation", "stores")

    @property
    def computation(self) -> str:
        """The kind, such as "gemm", or the varied case's kind."""
        if not self.is_varied:
            return self.kind
        return "embedding" if self.operator == "embedding_all_to_all" else "gemm"

    @property
    def collective(self) -> str:
        """The collective that does the same apart from the computation."""
        return COLLECTIVES[self.operator]

    @property
    def is_gathered(self) -> bool:
        """True if the collective comes before the computation."""
        return self.operator in GATHERED

    @property
    def buffers(self) -> int:
        """Inputs and weights that the calls in a graph rotate over: a divisor of `calls`."""
        shape = self.shape
        if self.computation == "embedding":
            # For indices and rows; indices are made anew before each replay.
            count = shape["tables"] * shape["batch"] * shape["pooling"]
            each = count * (4 + 2 * shape["dim"])
        elif self.computation == "norm":
            # Sums replace inputs, and are not summed again.
            each = 1
        else:
            columns, inner = shape.get("columns", shape.get("hidden", 0)), shape["inner"]
            each = self.itemsize * columns * inner // MOST_RANKS
        needed = min(self.calls, max(2, -(-APART // each)))
        return next(n for n in range(needed, self.calls + 1) if self.calls % n == 0)

    def vector(self) -> int:
        """Elements in an all-gather's whole output, or in a rank's input to other collectives.

        Two float8 elements count as one.
        """
        shape = self.shape
        if self.computation == "embedding":
            return shape["batch"] * shape["tables"] * shape["dim"]
        if "tokens" in shape:
            return shape["tokens"] * shape["hidden"]
        if not self.is_gathered:
            return shape["rows"] * shape["columns"]
        return shape["rows"] * shape["inner"] * self.itemsize // 2

    @property
    def itemsize(self) -> int:
        """Bytes per element in a GEMM's inputs and weights."""
        return 1 if self.kind == "scaled" else 2

    def exchange(self, ranks: int) -> Exchange:
        """The collective as a case in the collectives benchmark."""
        return Exchange(
            self.name,
            operation=self.collective,
            bytes=2 * self.vector(),
            calls=self.buffers,
            apart=1 << 60,
        )

    def local(self, ranks: int) -> tuple[int, int]:
        """Columns and inner size in a rank's weights."""
        shape = self.shape
        columns, inner = shape.get("columns", shape.get("hidden", 0)), shape.get("inner", 1)
        if self.operator == "all_gather_gemm":
            return columns // ranks, inner
        if self.collective in ("all_reduce", "reduce_scatter") and self.computation != "norm":
            return columns, inner // ranks
        return columns, inner

    def unable(self, ranks: int, free: int | None) -> str | None:
        """Reason for which ranks cannot run it; None if they can.

        Args:
            ranks: rank count.
            free: free memory in bytes; None if not known.
        """
        shape = self.shape
        split = next(name for name in ("hidden", "batch", "rows") if name in shape)
        multiples = {split: ranks}
        if self.operator in ("gemv_all_reduce", "gemm_reduce_scatter", "gemm_all_reduce"):
            multiples["inner"] = 8 * ranks
        if self.operator == "all_gather_gemm":
            multiples["columns"] = 8 * ranks
        if (reason := indivisible(shape, ranks, multiples)) is not None:
            return reason
        if free is not None and (needed := self.bytes(ranks)) > free:
            return f"needs {needed >> 30} GiB on the GPU, and {free >> 30} GiB are free"
        return None

    def bytes(self, ranks: int) -> int:
        """Memory estimate: weights, inputs, and results for several sides."""
        shape, buffers = self.shape, self.buffers
        vectors = 8 * buffers * 2 * self.vector()
        if self.computation == "embedding":
            indices = 2 * 8 * shape["tables"] * shape["batch"] * shape["pooling"]
            table = 2 * shape["rows"] * shape["dim"]
            references = 3 * 4 * self.vector()
            return vectors + references + buffers * indices + (shape["tables"] + 4) * table
        columns, inner = self.local(ranks)
        rows = shape.get("rows", shape.get("tokens", 0))
        results = (8 if self.is_gathered else 2) * buffers * 2 * rows * columns
        # References are in float32, with every rank's weights and inputs in turn.
        references = 32 * rows * columns
        return vectors + results + references + (2 * buffers + 6) * (columns + rows) * inner

    @property
    def has_choice(self) -> bool:
        """True if an operator call chooses between the kernel and a composition."""
        return self.kind in ("gemm", "gemv_norm")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Algorithms that a caller can force in the operator."""
        return ALGORITHMS if "tokens" in self.shape else ()


def timed(name: str, kind: str, operator: str, shape: dict[str, int]) -> Case:
    """Case with as many calls and replays as an H200 on two ranks has time for."""
    case = Case(name, kind, operator, shape)
    if kind == "embedding":
        rows = shape["tables"] * shape["batch"] * shape["pooling"]
        microseconds = rows * shape["dim"] * 2 / 2.5e6 + case.vector() / 3e5
    elif kind == "norm":
        microseconds = 10.0
    else:
        columns, inner = case.local(2)
        rows = shape.get("rows", shape.get("tokens", 0))
        microseconds = max(2 * rows * columns * inner / 6e8, 2 * columns * inner / 4e6)
        microseconds += case.vector() / 3e5
    calls = 10 if microseconds < 2000 else 2
    replays = 20 if calls * microseconds < 10_000 else 8
    seconds = 4.0 + 12 * (replays + 4) * calls * microseconds / 1e6
    return Case(name, kind, operator, shape, calls, replays, seconds)


def embedding() -> Iterator[Case]:
    """Tables with pooling, the usual ranking model sizes first."""
    shapes = sorted(
        product(TABLES, DIMENSIONS, BATCHES, POOLINGS),
        key=lambda shape: sum(
            values.index(value)
            for values, value in zip((TABLES, DIMENSIONS, BATCHES, POOLINGS), shape, strict=True)
        ),
    )
    for tables, dim, batch, pooling in shapes:
        name = f"embedding {tables}x{dim} batch {batch} pooling {pooling}"
        shape = {"tables": tables, "dim": dim, "batch": batch, "pooling": pooling}
        yield timed(name, "embedding", "embedding_all_to_all", shape | {"rows": TABLE_ROWS})


def gemv() -> Iterator[Case]:
    """Projections before an all-reduce, at decode, then with residual and RMS norm."""
    kinds = ("gemv", "gemv_norm")
    for tokens, kind, (layer, (hidden, inner)) in product(TOKENS, kinds, PROJECTIONS.items()):
        shape = {"hidden": hidden, "inner": inner, "tokens": tokens}
        yield timed(f"{kind} {layer} {tokens}", kind, "gemv_all_reduce", shape)


def norm() -> Iterator[Case]:
    """All-reduce with residual and RMS norm."""
    for tokens in NORM_TOKENS:
        shape = {"hidden": NORM_HIDDEN, "tokens": tokens}
        yield timed(f"norm {NORM_HIDDEN} {tokens}", "norm", "all_reduce_rms_norm", shape)


def gemm() -> Iterator[Case]:
    """GEMMs beside collectives."""
    for rows, ((operator, model), (columns, inner)) in product(ROWS, LAYERS.items()):
        shape = {"rows": rows, "columns": columns, "inner": inner}
        yield timed(f"{operator} {model} {rows}", "gemm", operator, shape)


def in_turn(*groups: Iterable[Case]) -> Iterator[Case]:
    """One from each group after the other, so that a short run has some from every group."""
    for each in zip_longest(*groups):
        yield from (case for case in each if case is not None)


#: Run order: the most important first.
CASES: Final = tuple(in_turn(embedding(), gemm(), gemv(), norm()))


def ablation() -> Iterator[Case]:
    """The fused operator with other tiling sizes."""
    by_name = {case.name: case for case in CASES}
    for name in ABLATED:
        case = by_name[name]
        sizes = EMBEDDING_SIZES if case.kind == "embedding" else GEMM_SIZES
        if case.operator == "all_gather_gemm":
            sizes = sizes | {"senders": SENDERS}
        # The estimate is for about twelve sides.
        seconds = case.seconds * (1 + sum(map(len, sizes.values()))) / 12
        yield replace(
            case,
            name=f"ablation {name}",
            kind="ablation",
            seconds=seconds,
            limit=180.0,
            sizes=sizes,
        )


def stores() -> Iterator[Case]:
    """GEMMs that send, by tilings with ordinary, paced and bulk stores."""
    by_name = {case.name: case for case in CASES}
    for name in STORED:
        case = by_name[name]
        # The estimate is for about twelve sides, as many as here.
        tilings = [
            each
            for each in STORES
            if "bulk_stores" not in each or case.operator == "gemm_all_to_all"
        ]
        yield replace(case, name=f"stores {name}", kind="stores", limit=180.0, tilings=tilings)


#: Cases that run only by name.
ABLATIONS: Final = (*ablation(), *stores())
#: The same for float8 GEMMs.
SCALED: Final = tuple(
    replace(case, name=f"scaled {case.name}", kind="scaled")
    for case in CASES
    if case.kind == "gemm"
)


def choose(names: str | None) -> list[Case]:
    """Cases by kinds, full names or first words, with commas; by default no varied or float8 case.

    Raises:
        ValueError: if a name matches no case.
    """
    if names is None:
        return list(CASES)
    chosen: dict[str, Case] = {}
    every = (*CASES, *ABLATIONS, *SCALED)
    for name in names.split(","):
        of_kind = [case for case in every if case.kind == name.strip()]
        chosen |= {case.name: case for case in of_kind or named(name, every)}
    return list(chosen.values())


def tiny(cases: list[Case]) -> list[Case]:
    """The first case for each kind and operator with a small shape and few replays."""
    found: dict[tuple[str, str], Case] = {}
    for case in cases:
        small = replace(case, shape=dict(TINY[case.computation]), calls=2, replays=1, seconds=1.0)
        if case.kind == "ablation":
            small = replace(small, sizes=TINY_SIZES[case.operator])
        if case.kind == "stores":
            small = replace(small, tilings=TINY_STORES)
        found.setdefault((case.kind, case.operator), small)
    return list(found.values())
