"""Query and answer tensors: element types and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weft.base.arguments import expect_list, expect_range, expect_text
from weft.base.errors import ConfigurationError, ShapeError

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
    """A dimension that varies from query to query, from 0 to `bound`. At most one per tensor."""

    bound: int


@dataclass(frozen=True)
class Tensor:
    """A tensor in a query or an answer, for example `Tensor("x", "float32", (3, 224, 224))`.

    Args:
        name: name, up to 255 bytes.
        dtype: numpy name for the element type: uint8, int8, int32, int64, float16, float32 or
            float64; with a device also bfloat16.
        shape: dimensions, without one for the batch.
    """

    name: str
    dtype: str
    shape: tuple[int | UpTo, ...]

    def to_json(self) -> dict[str, Any]:
        """As the native module takes it."""
        shape = [{"up_to": size.bound} if isinstance(size, UpTo) else size for size in self.shape]
        return {"name": self.name, "dtype": self.dtype, "shape": shape}

    def check(self) -> None:
        """Raise unless the values have the right types; the native module checks their ranges.

        Raises:
            TypeError, ConfigurationError: names the argument.
        """
        expect_text(self.name, "name of a tensor")
        expect_text(self.dtype, "dtype of a tensor")
        for size in expect_list(self.shape, "shape of a tensor"):
            expect_range(size.bound if isinstance(size, UpTo) else size, "shape", 0, 2**63 - 1)

    def check_dtype(self) -> None:
        """Raise `ConfigurationError` unless tensors support the element type."""
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
    """Raise `ShapeError` unless a query's output has a shape that the tensor allows."""
    if len(shape) != len(tensor.shape) or not all(map(fits, shape, tensor.shape)):
        expected = ", ".join(
            f"<={size.bound}" if isinstance(size, UpTo) else str(size) for size in tensor.shape
        )
        raise ShapeError(f"output {tensor.name!r} of shape {tuple(shape)}: expected ({expected})")


def fits(size: int, expected: int | UpTo) -> bool:
    """True if a dimension is the expected one."""
    return size <= expected.bound if isinstance(expected, UpTo) else size == expected
