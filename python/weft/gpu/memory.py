"""Memory at an address as tensors, and the caller's tensors as addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from weft.base.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["address", "allocator", "memory_at"]

Size: TypeAlias = tuple[int, ...]


class _Bytes:
    """Memory not owned by torch, in the two protocols by which torch and numpy take it."""

    def __init__(self, address: int, shape: tuple[int, int], owner: object) -> None:
        self._owner = owner
        description = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        self.__array_interface__ = description
        self.__cuda_array_interface__ = description


def allocator(device: torch.device) -> Callable[[Size, Size, torch.dtype], torch.Tensor]:
    """Allocator for tensors by size, strides and dtype on a device, like `torch.empty_strided`.

    If this version has it, the allocator from torch's compiler is used: it takes half the time, and
    only allocates on the current device.
    """

    def usual(size: Size, strides: Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, strides, dtype=dtype, device=device)

    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", usual)
    if quick is usual or device.type != "cuda":
        return quick
    current, ordinal = torch._C._cuda_getDevice, device.index

    def on_gpu(size: Size, strides: Size, dtype: torch.dtype) -> torch.Tensor:
        return (quick if current() == ordinal else usual)(size, strides, dtype)

    return on_gpu


def memory_at(
    address: int, shape: tuple[int, int], device: torch.device, owner: object
) -> torch.Tensor:
    """Memory at an address as uint8 in `shape`, rows and bytes; the tensor keeps `owner` alive."""
    given = _Bytes(address, shape, owner)
    if device.type == "cuda":
        return torch.as_tensor(given, device=device)
    return torch.from_numpy(np.asarray(given))


def address(tensor: torch.Tensor, what: str, alignment: int = 1) -> int:
    """Address at which a tensor begins.

    Raises:
        ShapeError: if it is not contiguous or not aligned.
    """
    if not tensor.is_contiguous():
        raise ShapeError(f"{what} is not contiguous: pass {what}.contiguous()")
    begin: Any = tensor.data_ptr()
    if begin % alignment:
        raise ShapeError(
            f"{what} begins at an address that is not a multiple of {alignment} bytes: pass a copy "
            f"({what}.clone())"
        )
    return int(begin)
