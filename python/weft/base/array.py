"""The caller's arrays as addresses, without copies: numpy, torch, and objects with DLPack."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from weft import _native
from weft.base.arguments import shown
from weft.base.errors import ConfigurationError, RegionError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "DTYPES",
    "FLOAT8",
    "SCALES",
    "Array",
    "Buffer",
    "array",
    "buffer",
    "dtype_name",
    "empty_like",
    "is_torch",
    "refuse_foreign_order",
    "refuse_gradient",
    "view",
]

#: Dtypes without scales.
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
#: Dtypes with scales.
FLOAT8: Final[dict[str, np.dtype[Any]]] = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
#: Scale dtypes. float8_e8m0fnu bytes may also be given as uint8.
SCALES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_ARRAYS: Final = DTYPES | FLOAT8 | SCALES | {"uint8": np.dtype(np.uint8)}

#: Buffer protocol format prefixes for the other byte order.
_FOREIGN: Final = (">", "!") if sys.byteorder == "little" else ("<",)

#: DLPack device types that the CPU can load and store: CPU, and pinned by CUDA or ROCm.
CPU_MEMORY: Final = (1, 3, 11)
#: DLPack device type for a CUDA device.
CUDA_MEMORY: Final = 2
#: CUDA's legacy default stream, as DLPack and https://data-apis.org/array-api/latest/ number it.
DEFAULT_STREAM: Final = 1


class Array(NamedTuple):
    """A contiguous array in CPU memory."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    owner: object

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return prod(self.shape) * _ARRAYS[self.dtype].itemsize

    def native(self) -> tuple[int, int, object]:
        """Arguments for the native module: address, bytes, owner."""
        return self.address, self.nbytes, self.owner


def dtype_name(dtype: object, allowed: Collection[str] = tuple(DTYPES), what: str = "dtype") -> str:
    """Dtype name, called `what` in errors, for a name, a numpy dtype or a torch dtype.

    Raises:
        ConfigurationError: if it is not allowed here.
    """
    name = str(dtype).removeprefix("torch.") if "torch" in type(dtype).__module__ else None
    if name is None:
        try:
            name = np.dtype(_ARRAYS.get(dtype, dtype) if isinstance(dtype, str) else dtype).name  # type: ignore[call-overload]
        # numpy has a separate error for each kind of value.
        except (TypeError, ValueError, OverflowError, SyntaxError) as error:
            raise ConfigurationError(
                f"{what} {shown(dtype)}: expected one of {', '.join(allowed)}"
            ) from error
    if name not in allowed:
        raise ConfigurationError(f"{what} {name} is not supported: {', '.join(allowed)} are")
    return name


def array(value: object, what: str, *, writable: bool = False) -> Array:
    """Take the array `value`, called `what` in errors.

    Raises:
        ShapeError: if it is not contiguous, not in native byte order or has no supported dtype.
        RegionError: if it is not in CPU memory, or read-only though it must be `writable`.
        ConfigurationError: if it requires a gradient.
    """
    if isinstance(value, np.ndarray):
        refuse_foreign_order(value.dtype, what)
        if value.dtype.name not in _ARRAYS:
            raise ShapeError(f"{what} is of dtype {value.dtype}; {', '.join(DTYPES)} are supported")
        if not value.flags.c_contiguous:
            raise ShapeError(f"{what} is not contiguous: pass numpy.ascontiguousarray of it")
        if writable and not value.flags.writeable:
            raise RegionError(f"{what} is read-only: pass an array that may be written to")
        return Array(value.ctypes.data, value.shape, value.dtype.name, value)
    if not hasattr(value, "__dlpack__"):
        raise ShapeError(f"{what} is a {type(value).__name__}, not an array: pass numpy or DLPack")
    refuse_gradient(value, what)
    name = str(value.dtype).removeprefix("torch.") if is_torch(value) else ""  # type: ignore[attr-defined]
    if name in FLOAT8 or name == "float8_e8m0fnu":
        # Not every version of torch shares 8-bit floats by DLPack; bytes they all do.
        shared = array(value.view(sys.modules["torch"].uint8), what, writable=writable)  # type: ignore[attr-defined]
        return shared._replace(dtype=name)
    capsule = dlpack(value, what)
    address, shape, name, _ = _native.dlpack_tensor(capsule, what)
    if name not in _ARRAYS:
        raise ShapeError(f"{what} is of dtype {name}; {', '.join(DTYPES)} are supported")
    return Array(address, tuple(shape), name, capsule)


class Buffer(NamedTuple):
    """Contiguous bytes with any dtype, in CPU memory or on the CUDA device `device`."""

    address: int
    nbytes: int
    owner: object
    writable: bool
    device: int | None = None


def buffer(value: object, what: str) -> Buffer:
    """Bytes of `value`, called `what` in errors.

    `value` is numpy, DLPack (CPU or CUDA), CUDA's array interface or the buffer protocol
    (https://docs.python.org/3/c-api/buffer.html).

    Raises:
        ShapeError: if it is not C-contiguous or not in native byte order, or has no bytes.
        RegionError: if it is neither in CPU memory nor on a CUDA device.
    """
    if isinstance(value, np.ndarray):
        refuse_foreign_order(value.dtype, what)
        if value.dtype.hasobject:
            raise ShapeError(f"{what} holds Python objects (dtype {value.dtype}), not bytes")
        if not value.flags.c_contiguous:
            raise ShapeError(f"{what} is not contiguous: pass numpy.ascontiguousarray of it")
        return Buffer(value.ctypes.data, value.nbytes, value, value.flags.writeable)
    if hasattr(value, "__dlpack__"):
        device = cuda_device(value)
        capsule = dlpack(value, what, device)
        address, _, _, length = _native.dlpack_tensor(capsule, what, device)
        return Buffer(address, length, capsule, True, device)
    if hasattr(value, "__cuda_array_interface__"):
        return cuda_array(value, what)
    try:
        exported = memoryview(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ShapeError(
            f"{what} is a {type(value).__name__}, which has no bytes: pass a numpy array, or what "
            "has DLPack or the buffer protocol"
        ) from error
    if any(mark in exported.format for mark in _FOREIGN):
        raise ShapeError(
            f"{what} has elements of format {exported.format!r}: native byte order is needed; pass "
            "array.astype(array.dtype.newbyteorder('=')), where array is numpy.asarray of it"
        )
    if not exported.c_contiguous:
        raise ShapeError(f"{what} is not contiguous: pass bytes of it, or a contiguous copy")
    flat = np.frombuffer(exported, dtype=np.uint8)
    return Buffer(flat.ctypes.data, flat.nbytes, flat, not exported.readonly)


def cuda_array(value: Any, what: str) -> Buffer:
    """Bytes in an object with CUDA's array interface (version 2 or 3).

    Raises:
        ShapeError: if it is not C-contiguous, or masked.
        RegionError: if the address is not on a CUDA device.
        ProviderError: if there is no CUDA driver.
    """
    interface = value.__cuda_array_interface__
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    size = np.dtype(interface["typestr"]).itemsize
    nbytes = prod(shape) * size
    if interface.get("mask") is not None:
        raise ShapeError(f"{what} has a mask: pass its data and its mask as arrays of their own")
    expected = size
    for extent, stride in reversed(list(zip(shape, strides or (), strict=False))):
        if nbytes and extent > 1 and stride != expected:
            raise ShapeError(f"{what} is not contiguous: pass a contiguous copy")
        expected *= extent
    address, read_only = interface["data"]
    # The interface names no device, and no bytes have no address.
    device = _native.cuda_device_of(address) if nbytes else 0
    return Buffer(address, nbytes, value, not read_only, device)


def cuda_device(value: Any) -> int | None:
    """CUDA ordinal in a DLPack tensor; `None` for another device type."""
    if not hasattr(value, "__dlpack_device__"):
        return None
    kind, number = value.__dlpack_device__()
    return int(number) if kind == CUDA_MEMORY else None


def dlpack(value: Any, what: str, device: int | None = None) -> object:
    """Capsule for a tensor in CPU memory, or on the CUDA device with this ordinal.

    Work that the producer has put on its stream is ordered before later work on that device's
    legacy default stream. See https://dmlc.github.io/dlpack/latest/python_spec.html.

    Raises:
        RegionError: if it is elsewhere, or cannot be shared.
    """
    if device is None and hasattr(value, "__dlpack_device__"):
        kind, number = value.__dlpack_device__()
        if kind not in CPU_MEMORY:
            raise RegionError(
                f"{what} is not in CPU memory (DLPack device type {kind}, number {number}): copy "
                "it there first"
            )
    if getattr(value, "requires_grad", False):
        value = value.detach()
    try:
        return value.__dlpack__() if device is None else value.__dlpack__(stream=DEFAULT_STREAM)
    except (BufferError, TypeError, RuntimeError) as error:
        raise RegionError(f"{what} cannot be shared by DLPack: {error}") from error


def refuse_foreign_order(dtype: np.dtype[Any], what: str) -> None:
    """Raise unless elements are in this machine's byte order, in which every rank reads them.

    Raises:
        ShapeError: if they are not.
    """
    if not dtype.isnative:
        raise ShapeError(
            f"{what} is of dtype {dtype}: native byte order is needed; pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )


def refuse_gradient(value: object, what: str) -> None:
    """Raise if `value` is a tensor whose gradient would be lost.

    Raises:
        ConfigurationError: if it requires a gradient, unless under `torch.no_grad()`.
    """
    if not getattr(value, "requires_grad", False):
        return
    torch = sys.modules.get("torch")
    if torch is None or torch.is_grad_enabled():
        raise ConfigurationError(
            f"{what} requires a gradient, and this round has none: make the all-to-all with "
            f"gradients=True, pass {what}.detach(), or call under torch.no_grad()"
        )


def is_torch(value: object) -> bool:
    """True for a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def view(
    buffer: _native.View, dtype: str, shape: tuple[int, ...], stride: int, like: object
) -> Any:
    """Rows in Weft's memory as the same array type as `like`: torch for torch, else numpy.

    Args:
        buffer: the memory.
        dtype: element dtype.
        shape: `[rows, hidden]`.
        stride: bytes between row starts.
        like: an array from the caller.
    """
    size = _ARRAYS[dtype].itemsize
    rows, hidden = shape
    if is_torch(like):
        torch = sys.modules["torch"]
        if rows * hidden == 0:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        flat = torch.frombuffer(buffer, dtype=getattr(torch, dtype))
        return flat.as_strided((rows, hidden), (stride // size, 1))
    return np.ndarray((rows, hidden), _ARRAYS[dtype], memoryview(buffer), strides=(stride, size))


def empty_like(like: object, shape: tuple[int, ...], dtype: str) -> Any:
    """New array with the same type as `like`."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return np.empty(shape, dtype=DTYPES[dtype])
