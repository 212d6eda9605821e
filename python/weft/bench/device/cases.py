"""Benchmark cases, the most important ones first."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from weft.base.array import DTYPES, FLOAT8
from weft.bench.moe_workload import Workload

__all__ = ["BLOCK", "CASES", "KINDS", "Case", "choose", "small"]

#: Elements that share a scale.
BLOCK: Final = 128
LAYOUTS: Final = ("contiguous", "indexed", "padded", "dense")
KINDS: Final = ("rounds", "modes", "harness", "late", "gemm", "start")


@dataclass(frozen=True)
class Case:
    """One workload to measure. Raises `ValueError` with the reason for an invalid one."""

    name: str
    #: Name of a function in `measures`.
    kind: str = "rounds"
    #: Per rank and round.
    tokens: int = 128
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    #: Type of the tokens passed to dispatch: bfloat16 or another wide type, or 8-bit with scales.
    dtype: str = "bfloat16"
    #: Type on the wire: `dtype`, or an 8-bit type to which the kernel casts.
    wire: str = "float8_e4m3fn"
    layout: str = "contiguous"
    #: Blocks per launch; None leaves it to Weft.
    num_sms: int | None = None
    #: The protocol's path; None leaves it to Weft.
    path: str | None = None
    routing: str = "uniform"
    seed: int = 0
    #: Rounds per graph, each with separate inputs.
    slots: int = 8
    #: Replays that are measured.
    samples: int = 50
    #: Measure the send and receive halves as well.
    halves: bool = False
    #: Measure with the caches flushed before each round as well.
    cold: bool = False
    #: True to measure NCCL with the same bytes too.
    beside: bool = True
    #: For kind "start": the compiled-kernel cache, empty ("cold") or filled ("warm").
    cache: str | None = None
    #: For kind "late": the last rank's delay in microseconds.
    late_us: float = 0.0
    #: Estimated seconds: the case is skipped with less time left.
    seconds: float = 15.0
    #: Timeout in seconds, after which the ranks are killed.
    limit: float = 150.0

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "experts", "top_k", "slots", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.kind not in KINDS:
            raise ValueError(f"a case is one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r} is none of {', '.join(LAYOUTS)}")
        if self.dtype not in (*DTYPES, "float8_e4m3fn"):
            wide = ", ".join((*DTYPES, "float8_e4m3fn"))
            raise ValueError(f"dtype {self.dtype} is not measured here: {wide} are")
        if self.wire not in (self.dtype, "float8_e4m3fn"):
            raise ValueError(
                f"{self.dtype} travels as it is or as float8_e4m3fn, not as {self.wire}"
            )
        if self.top_k > self.experts:
            raise ValueError(
                f"a token cannot name {self.top_k} different experts of {self.experts}:"
                " lower top_k or raise experts"
            )

    @property
    def casts(self) -> bool:
        """True if the kernel casts tokens as they leave."""
        return self.wire != self.dtype

    @property
    def scales(self) -> int:
        """Scales per token on the wire; 0 if it has none."""
        return -(-self.hidden // BLOCK) if self.wire in FLOAT8 else 0

    @property
    def token_bytes(self) -> int:
        """Bytes per token on the wire, with scales."""
        return self.hidden * (DTYPES | FLOAT8)[self.wire].itemsize + 4 * self.scales

    @property
    def reply_bytes(self) -> int:
        """Bytes per reply, which is in bfloat16 if tokens travel in 8 bits."""
        return self.hidden * DTYPES[self.wide].itemsize

    @property
    def wide(self) -> str:
        """Type of expert outputs, replies and the result."""
        return "bfloat16" if self.dtype in FLOAT8 else self.dtype

    def expert_capacity(self, ranks: int) -> int | None:
        """Rows per expert in the padded layout: the worst case."""
        return ranks * self.tokens if self.layout == "padded" else None

    def max_positions(self, ranks: int) -> int | None:
        """Positions per rank, if fewer than the worst case: long batches would fill a GPU.

        Twice what uniform routes bring.
        """
        by_pair = self.layout in ("contiguous", "indexed")
        if self.routing != "uniform" or not by_pair or self.tokens <= 1024:
            return None
        return min(2, ranks) * self.tokens * self.top_k

    def routes(self, ranks: int) -> Workload:
        """Token routing; the tokens themselves are made elsewhere and have one element."""
        return Workload(
            ranks=ranks,
            tokens=self.tokens,
            hidden=1,
            experts=self.experts,
            top_k=self.top_k,
            dtype="float32",
            routing=self.routing,
            rounds=1,
            seed=self.seed,
        )

    def to_json(self) -> dict[str, Any]:
        """A value that `json` can write, and `Case(**value)` takes."""
        return asdict(self)


DECODE: Final = Case("decode")
PREFILL: Final = Case(
    "prefill", tokens=4096, layout="indexed", slots=2, samples=30, seconds=25, limit=240
)


def sweep() -> list[Case]:
    """Cases that change one number of decode at a time."""
    quick = replace(DECODE, slots=4, samples=20, beside=False, seconds=10)
    axes: dict[str, tuple[Any, ...]] = {
        "routing": ("zipf", "incast"),
        "hidden": (2048, 4096, 6144, 8192),
        "top_k": (1, 2, 4, 6, 12),
        "experts": (8, 32, 64, 128, 512),
    }
    return [
        replace(quick, **{"name": f"sweep {axis} {value}", axis: value})
        for axis, values in axes.items()
        for value in values
    ]


def start(cache: str) -> Case:
    """Ranks started anew, which all compile or load the same kernels at once."""
    return replace(
        DECODE, name=f"start {cache}", kind="start", cache=cache, seconds=30, beside=False
    )


#: The order in which they are run.
CASES: Final = (
    replace(DECODE, halves=True, cold=True, seconds=30),
    replace(DECODE, name="harness", kind="harness"),
    replace(DECODE, name="one token", tokens=1),
    replace(PREFILL, name="prefill 24", num_sms=24),
    replace(PREFILL, name="prefill 64", num_sms=64),
    replace(
        PREFILL,
        name="prefill dense",
        layout="dense",
        wire="bfloat16",
        num_sms=24,
        beside=False,
    ),
    replace(DECODE, name="modes", kind="modes", seconds=25),
    replace(DECODE, name="late", kind="late", late_us=200.0, slots=4),
    replace(DECODE, name="decode given fp8", dtype="float8_e4m3fn", beside=False),
    replace(DECODE, name="decode indexed", layout="indexed", halves=True, beside=False),
    replace(PREFILL, name="prefill 32", num_sms=32, beside=False),
    start("cold"),
    start("warm"),
    replace(DECODE, name="decode bf16", wire="bfloat16", beside=False),
    replace(PREFILL, name="prefill", beside=False),
    *(
        replace(PREFILL, name=f"gemm {sms}", kind="gemm", num_sms=sms, beside=False)
        for sms in (16, 24, 32, 64)
    ),
    replace(PREFILL, name="prefill bf16", wire="bfloat16", num_sms=24, beside=False),
    *sweep(),
)


def choose(names: str, cases: tuple[Case, ...] = CASES) -> list[Case]:
    """The cases that were named, with commas, or `all`; a name stands for all that begin with it.

    Raises:
        ValueError: names one that does not exist, and those that do.
    """
    if names.strip() == "all":
        return list(cases)
    chosen: list[Case] = []
    for name in (part.strip() for part in names.split(",")):
        exact = [case for case in cases if case.name == name]
        found = exact or [case for case in cases if name and case.name.split(" ")[0] == name]
        if not found:
            every = ", ".join(case.name for case in cases)
            raise ValueError(f"there is no case {name!r}; there are {every}")
        chosen += [case for case in found if case not in chosen]
    return chosen


def small(case: Case) -> Case:
    """The same on a CPU: the protocol as it is, few and short tokens, few rounds."""
    experts = min(case.experts, 16)
    return replace(
        case,
        tokens=min(case.tokens, 6),
        hidden=min(case.hidden, 2 * BLOCK),
        experts=experts,
        top_k=min(case.top_k, 4, experts),
        num_sms=None,
        slots=2,
        samples=2,
    )
