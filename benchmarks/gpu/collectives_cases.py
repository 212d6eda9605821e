"""Cases for the device collectives benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Self

import harness.cases
from harness.cases import named

__all__ = ["CASES", "OPERATIONS", "SIZES", "Case", "choose", "small"]

OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: Bytes in the whole output for all_gather, in the whole input for the others, as in nccl-tests:
#: https://github.com/NVIDIA/nccl-tests
SIZES: Final = (1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
#: SM counts in a sweep, with operations and sizes.
SWEPT_SMS: Final = (8, 16, 20, 24, 32, 48, 64)
SWEPT_OPERATIONS: Final = OPERATIONS
SWEPT_SIZES: Final = SIZES[4:]
#: Longest vector on the twin, where a CPU moves the bytes.
TWIN_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Case(harness.cases.Case):
    """One operation at one size, by all sides in turn."""

    #: Key in `collectives_measures.MEASURES`.
    kind: str = "collective"
    operation: str = "all_reduce"
    bytes: int = 0
    dtype: str = "bfloat16"
    #: Calls per graph, over as many buffers as `buffers` returns.
    calls: int = 10
    #: Fewest replays per side.
    replays: int = 20
    #: Input bytes on a rank between two uses of the same buffer: twice an H200's L2.
    apart: int = 100 << 20
    #: SM counts in the sweep.
    num_sms: tuple[int, ...] = ()
    #: Estimate, to skip a case for which too little time is left, and time limit; in seconds.
    seconds: float = 2.0
    limit: float = 30.0

    @property
    def buffers(self) -> int:
        """Buffers that the calls in a graph rotate over."""
        return min(self.calls, max(2, -(-self.apart // max(self.bytes, 1))))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """A case from JSON, which has turned the tuple into a list."""
        return cls(**fields | {"num_sms": tuple(fields["num_sms"])})


def size_name(size: int) -> str:
    """Size in case names, for example 64K or 8M."""
    return f"{size >> 20}M" if size >= 1 << 20 else f"{size >> 10}K"


def collective(operation: str, size: int) -> Case:
    """Case for an operation at a size."""
    large = size >= 256 << 20
    return Case(
        f"{operation} {size_name(size)}",
        operation=operation,
        bytes=size,
        replays=10 if large else 20,
        seconds=3.0 if large else 2.0,
    )


def sweep(operation: str, size: int) -> Case:
    """Case for an operation at a size, by chunks and between symmetric tensors."""
    return Case(
        f"sweep {operation} {size_name(size)}",
        kind="sweep",
        operation=operation,
        bytes=size,
        replays=6,
        num_sms=SWEPT_SMS,
        seconds=5.0,
        limit=60.0,
    )


#: Run order: sizes with the smallest step first, the sweep last.
CASES: Final = (
    *(collective(operation, size) for operation in OPERATIONS for size in SIZES),
    Case("barrier", kind="barrier", operation="barrier"),
    Case("called", kind="called", bytes=1 << 10),
    Case("gemm", kind="gemm", bytes=64 << 20, replays=5, seconds=9.0, limit=60.0),
    *(sweep(operation, size) for operation in SWEPT_OPERATIONS for size in SWEPT_SIZES),
)


def choose(names: str | None) -> list[Case]:
    """Cases by full names or first words, with commas; by default all but the sweep.

    Raises:
        ValueError: if a name matches no case.
    """
    if names is None:
        return [case for case in CASES if case.kind != "sweep"]
    return named(names, CASES)


def small(cases: list[Case]) -> list[Case]:
    """Cases for the twin: the shorter sizes, with few replays.

    Raises:
        ValueError: if there is none.
    """
    found = {case.name: replace(case, replays=3) for case in cases if case.bytes <= TWIN_BYTES}
    for operation in dict.fromkeys(case.operation for case in cases if case.kind == "sweep"):
        case = sweep(operation, TWIN_BYTES)
        found[case.name] = replace(case, num_sms=(1, 2), replays=3)
    if not found:
        raise ValueError("--device twin: no case is short enough; expected sizes up to 64K")
    return list(found.values())
