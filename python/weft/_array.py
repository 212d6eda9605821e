"""Arrays of the caller, as addresses, without copies: numpy, torch, and whatever speaks DLPack."""

from __future__ import annotations

import sys
from math import prod
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from weft import _native
from weft.errors import ConfigurationError, RegionError, ShapeError

__all__ = ["DTYPES", "Array", "array", "dtype_name", "empty_like", "view"]

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class Array(NamedTuple):
    """A contiguous array in CPU memory."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    owner: object

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def native(self) -> tuple[int, int, object]:
        """What the native module takes: address, bytes, owner."""
        return self.address, self.nbytes, self.owner


def dtype_name(dtype: object) -> str:
    """The name of a dtype given as a name, a numpy dtype or a torch dtype.

    Raises:
        ConfigurationError: if Weft does not support it.
    """
    name = str(dtype).removeprefix("torch.") if "torch" in type(dtype).__module__ else None
    if name is None:
        try:
            name = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype).name  # type: ignore[call-overload]
        except TypeError as error:
            raise ConfigurationError(f"{dtype!r} is not a dtype") from error
    if name not in DTYPES:
        raise ConfigurationError(f"dtype {name} is not supported: {', '.join(DTYPES)} are")
    return name


def array(value: object, what: str) -> Array:
    """The array `value`, called `what` in errors.

    Raises:
        ShapeError: if it is not contiguous or not of a supported dtype.
        RegionError: if it is not in CPU memory.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.name not in DTYPES:
            raise ShapeError(f"{what} is of dtype {value.dtype}; {', '.join(DTYPES)} are supported")
        if not value.flags.c_contiguous:
            raise ShapeError(f"{what} is not contiguous: pass numpy.ascontiguousarray of it")
        return Array(value.ctypes.data, value.shape, value.dtype.name, value)
    if not hasattr(value, "__dlpack__"):
        raise ShapeError(f"{what} is a {type(value).__name__}, not an array: pass numpy or DLPack")
    if getattr(value, "requires_grad", False):
        value = value.detach()  # type: ignore[attr-defined]
    try:
        capsule = value.__dlpack__()
    except (BufferError, TypeError, RuntimeError) as error:
        raise RegionError(f"{what} cannot be shared by DLPack: {error}") from error
    address, shape, name = _native.dlpack_tensor(capsule)
    if name not in DTYPES:
        raise ShapeError(f"{what} is of dtype {name}; {', '.join(DTYPES)} are supported")
    return Array(address, tuple(shape), name, capsule)


def is_torch(value: object) -> bool:
    """Whether `value` is a torch tensor; torch is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def view(
    buffer: _native.View, dtype: str, shape: tuple[int, ...], stride: int, like: object
) -> Any:
    """Rows of Weft's memory as an array of the same kind as `like`: torch for torch, else numpy.

    Args:
        buffer: the memory.
        dtype: the elements'.
        shape: `[rows, hidden]`.
        stride: bytes from one row to the next.
        like: an array of the caller.
    """
    size = DTYPES[dtype].itemsize
    rows, hidden = shape
    if is_torch(like):
        torch = sys.modules["torch"]
        if rows * hidden == 0:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        flat = torch.frombuffer(buffer, dtype=getattr(torch, dtype))
        return flat.as_strided((rows, hidden), (stride // size, 1))
    flat = np.frombuffer(memoryview(buffer), dtype=DTYPES[dtype])
    return np.lib.stride_tricks.as_strided(flat, (rows, hidden), (stride, size))


def empty_like(like: object, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array of the same kind as `like`."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return np.empty(shape, dtype=DTYPES[dtype])
