"""Cases of the benchmark of device collectives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CASES", "OPERATIONS", "SIZES", "Case", "choose", "named", "small"]

OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: Bytes of the whole output of all_gather, of the whole input of the others, as in nccl-tests.
SIZES: Final = (1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
#: Numbers of multiprocessors of a sweep, and its operations and sizes.
SWEPT_SMS: Final = (8, 16, 20, 24, 32, 48, 64)
SWEPT_OPERATIONS: Final = OPERATIONS
SWEPT_SIZES: Final = SIZES[4:]
#: Longest vector on the twin, where a CPU moves the bytes.
TWIN_BYTES: Final = 64 << 10


class HasName(Protocol):
    """A case of any benchmark."""

    @property
    def name(self) -> str:
        """Name."""
        ...


Named = TypeVar("Named", bound=HasName)


@dataclass(frozen=True)
class Case:
    """One operation at one size, by all sides in turn."""

    name: str
    #: Key of `collectives_measures.MEASURES`.
    kind: str = "collective"
    operation: str = "all_reduce"
    bytes: int = 0
    dtype: str = "bfloat16"
    #: Calls of a graph, over as many buffers as `buffers` returns.
    calls: int = 10
    #: Fewest replays of a side.
    replays: int = 20
    #: Bytes of a rank's input that lie between two uses of the same buffer: twice an H200's L2.
    apart: int = 100 << 20
    #: Numbers of multiprocessors of the sweep.
    num_sms: tuple[int, ...] = ()
    #: Estimate, to skip a case for which too little time is left, and time limit; in seconds.
    seconds: float = 2.0
    limit: float = 30.0

    @property
    def buffers(self) -> int:
        """Buffers that the calls of a graph rotate over."""
        return min(self.calls, max(2, -(-self.apart // max(self.bytes, 1))))

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """The inverse of `to_json`, after JSON has made lists of tuples."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**given)


def size_name(size: int) -> str:
    """Size as in names of cases: 64K, 8M."""
    return f"{size >> 20}M" if size >= 1 << 20 else f"{size >> 10}K"


def collective(operation: str, size: int) -> Case:
    """Case of an operation at a size."""
    large = size >= 256 << 20
    return Case(
        f"{operation} {size_name(size)}",
        operation=operation,
        bytes=size,
        replays=10 if large else 20,
        seconds=3.0 if large else 2.0,
    )


def sweep(operation: str, size: int) -> Case:
    """Case of an operation at a size, by chunks and between symmetric tensors."""
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


#: The order is that of the run: sizes of the smallest step first, the sweep last.
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


def named(names: str, cases: Sequence[Named]) -> list[Named]:
    """Cases by full names or first words, with commas.

    Raises:
        ValueError: if a name matches no case.
    """
    chosen: dict[str, Named] = {}
    for name in (word.strip() for word in names.split(",")):
        found = [case for case in cases if f"{case.name} ".startswith(f"{name} ")]
        if not found:
            known = ", ".join(dict.fromkeys(case.name.split(" ")[0] for case in cases))
            raise ValueError(f"--cases {name!r}: no such case; expected {known}, or a full name")
        chosen |= {case.name: case for case in found}
    return list(chosen.values())


def small(cases: list[Case]) -> list[Case]:
    """Cases for the twin: the shorter sizes, with few replays."""
    found = {case.name: replace(case, replays=3) for case in cases if case.bytes <= TWIN_BYTES}
    for operation in dict.fromkeys(case.operation for case in cases if case.kind == "sweep"):
        case = sweep(operation, TWIN_BYTES)
        found[case.name] = replace(case, num_sms=(1, 2), replays=3)
    return list(found.values())
