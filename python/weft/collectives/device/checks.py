"""Tensor checks for device collectives, and names in the native module.

Every call passes here before a launch, so the functions look up few attributes.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final, NoReturn

import torch

from weft.base.errors import ConfigurationError, ShapeError, UnknownError
from weft.gpu.tensors import is_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "REDUCTIONS",
    "WORDS",
    "address",
    "check_root",
    "fits",
    "refuse_op",
    "refuse_overlap",
    "row_splits",
    "rows_of",
]

_FLOATS: Final = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_INTEGERS: Final = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
)
#: By user-facing name: native module name, and true for an average.
_OPERATIONS: Final = {
    "sum": ("sum", False),
    "avg": ("sum", True),
    "product": ("product", False),
    "prod": ("product", False),
    "min": ("min", False),
    "max": ("max", False),
    "and": ("and", False),
    "band": ("and", False),
    "or": ("or", False),
    "bor": ("or", False),
    "xor": ("xor", False),
    "bxor": ("xor", False),
}
_BITWISE: Final = ("and", "or", "xor")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: By `op` and dtype: native element and reduction names, and true for an average.
REDUCTIONS: Final = {
    (op, dtype): (_name(dtype), reduction, average)
    for op, (reduction, average) in _OPERATIONS.items()
    for dtype in (*_INTEGERS, *_FLOATS)
    if not (reduction in _BITWISE and dtype in _FLOATS)
}

#: By element bytes: the unsigned type that moves it, and how many it contains.
WORDS: Final = {
    1: ("uint8", 1),
    2: ("uint16", 1),
    4: ("uint32", 1),
    8: ("uint64", 1),
    16: ("uint64", 2),
}


def refuse_op(op: object, dtype: torch.dtype) -> NoReturn:
    """Raise for an `op` and a dtype that are not in `REDUCTIONS`."""
    if op not in _OPERATIONS:
        raise ConfigurationError(f"op {op!r}: expected one of {', '.join(_OPERATIONS)}")
    if dtype in _FLOATS:
        raise ConfigurationError(
            f"{op} of {_name(dtype)}: expected bool or an integer dtype; use sum, product, min, "
            "max or avg"
        )
    raise ShapeError(
        f"{op} of {_name(dtype)}: expected one of {', '.join(map(_name, _INTEGERS + _FLOATS))}; "
        "cast the tensor"
    )


def address(tensor: torch.Tensor, what: str, device: torch.device) -> int:
    """A dense tensor's address on a device; 0 if it has no elements.

    Raises:
        ShapeError: if it is no tensor, on another device or not dense.
        ConfigurationError: if it requires a gradient, unless under `torch.no_grad()`.
    """
    if not isinstance(tensor, torch.Tensor):
        is_tensor(tensor, what)
    if tensor.device != device:
        raise ShapeError(f"{what} is on {tensor.device}: expected {device}, as these collectives")
    if tensor.layout is not torch.strided:
        raise ShapeError(f"{what} has layout {tensor.layout}: pass {what}.to_dense()")
    if not tensor.is_contiguous():
        raise ShapeError(f"{what} is not contiguous: pass {what}.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise ShapeError(
            f"{what} is a lazy conjugate or negation: pass {what}.resolve_conj().resolve_neg()"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ConfigurationError(
            f"{what} requires a gradient, and device collectives have none: pass {what}.detach(), "
            "or call under torch.no_grad()"
        )
    begin: int = tensor.data_ptr()
    if begin % min(tensor.itemsize, 8):
        raise ShapeError(
            f"{what} begins at an address that is not a multiple of its element: pass "
            f"{what}.clone()"
        )
    return begin


def fits(tensor: torch.Tensor, what: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise if a tensor has another shape or dtype."""
    if tensor.shape != shape:
        raise ShapeError(f"{what} has shape {tuple(tensor.shape)}; {tuple(shape)} is needed")
    if tensor.dtype != dtype:
        raise ShapeError(f"{what} is of dtype {tensor.dtype}; {dtype} is needed")


def refuse_overlap(in_place: str = "") -> NoReturn:
    """Raise since input and output overlap; `in_place`: the overlap that is allowed."""
    more = f", or {in_place}" if in_place else ""
    raise ShapeError(f"out overlaps the input: pass memory of its own{more}")


def check_root(root: int, ranks: int) -> None:
    """Raise if there is no such rank."""
    if not 0 <= root < ranks:
        raise UnknownError(f"root is {root}: expected a rank from 0 to {ranks - 1}")


def row_splits(splits: Sequence[int], what: str, ranks: int, rows: int | None) -> list[int]:
    """Rows by rank, as a list.

    Args:
        splits: given by the user.
        what: name for errors.
        ranks: rank count.
        rows: row total, if it is fixed.
    """
    if isinstance(splits, torch.Tensor):
        raise ShapeError(f"{what} is a tensor: pass {what}.tolist()")
    counts = [operator.index(each) for each in splits]
    if len(counts) != ranks:
        raise ShapeError(
            f"{what} has {len(counts)} numbers: expected one for each of {ranks} ranks"
        )
    if min(counts) < 0:
        raise ShapeError(f"{what} {counts}: expected numbers of rows from 0 on")
    if rows is not None and sum(counts) != rows:
        raise ShapeError(
            f"{what} {counts}: sum {sum(counts)}, expected the {rows} rows of the tensor"
        )
    return counts


def rows_of(tensor: torch.Tensor, what: str = "tensor") -> torch.Size:
    """Shape of a tensor that has rows."""
    shape = tensor.shape
    if not shape:
        raise ShapeError(f"{what} is a scalar: expected rows; pass {what}.view(1)")
    return shape
