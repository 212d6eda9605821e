"""Tensors of queries and answers: element types and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weft.errors import ConfigurationError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Tensor", "UpTo", "check_number", "check_queries", "check_shape"]

#: Element types, by numpy's names; numpy itself lacks bfloat16.
DTYPES: Final = (
    "uint8",
    "int8",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)


@dataclass(frozen=True)
class UpTo:
    """A dimension that varies from query to query, from 0 to `bound`. At most one of a tensor."""

    bound: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of a query or of an answer.

    Args:
        name: its name, of up to 255 bytes.
        dtype: numpy's name of its element type: uint8, int8, int32, int64, float16, float32 or
            float64; with a device also bfloat16.
        shape: its dimensions, without one for the batch.
    """

    name: str
    dtype: str
    shape: tuple[int | UpTo, ...]

    def to_json(self) -> dict[str, Any]:
        """As the native module takes it."""
        shape = [{"up_to": size.bound} if isinstance(size, UpTo) else size for size in self.shape]
        return {"name": self.name, "dtype": self.dtype, "shape": shape}

    def check_dtype(self) -> None:
        """Raise `ConfigurationError` unless the element type is one of a tensor."""
        if self.dtype not in DTYPES:
            raise ConfigurationError(
                f"dtype of a tensor {self.dtype!r}: expected {', '.join(DTYPES)}"
            )

    def is_variable(self) -> bool:
        """True if a dimension varies."""
        return any(isinstance(size, UpTo) for size in self.shape)


def check_number(tensors: Sequence[Tensor], outputs: Sequence[Any]) -> None:
    """Raise `ShapeError` unless a model has returned as many outputs as expected."""
    if len(outputs) != len(tensors):
        raise ShapeError(f"{len(outputs)} outputs of the model: expected {len(tensors)}")


def check_queries(tensor: Tensor, count: int, output: Any) -> None:
    """Raise `ShapeError` unless an output has a part for each query."""
    if len(output) != count:
        raise ShapeError(f"output {tensor.name!r} of {len(output)} queries: expected {count}")


def check_shape(tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise `ShapeError` unless the output of a query has a shape of its tensor."""
    if len(shape) != len(tensor.shape) or not all(map(fits, shape, tensor.shape)):
        expected = ", ".join(
            f"<={size.bound}" if isinstance(size, UpTo) else str(size) for size in tensor.shape
        )
        raise ShapeError(f"output {tensor.name!r} of shape {tuple(shape)}: expected ({expected})")


def fits(size: int, expected: int | UpTo) -> bool:
    """True if a dimension is the expected one."""
    return size <= expected.bound if isinstance(expected, UpTo) else size == expected
