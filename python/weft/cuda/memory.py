"""Rows of the symmetric heap as tensors, and tensors of the caller as addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from weft.cuda.config import VECTOR
from weft.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.cuda.config import Config

__all__ = ["HeapRows", "address", "allocator", "heap_rows", "memory_at"]

Size: TypeAlias = tuple[int, ...]


class HeapRows(NamedTuple):
    """Received rows in the heap: row `source * max_tokens + slot`."""

    tokens: torch.Tensor
    #: Empty if tokens have none.
    scales: torch.Tensor


class _Bytes:
    """Memory that is not torch's, in the two protocols by which torch and numpy take it."""

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
    """Allocator of tensors by size, strides and dtype on a device, as `torch.empty_strided`.

    It is that of torch's compiler, if this version of torch has it: it takes half of the time, and
    allocates on the current device alone.
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
    """Memory at an address as uint8 of `shape`, rows and bytes; the tensor keeps `owner` alive."""
    given = _Bytes(address, shape, owner)
    if device.type == "cuda":
        return torch.as_tensor(given, device=device)
    return torch.from_numpy(np.asarray(given))


def heap_rows(
    config: Config, device: torch.device, place: tuple[int, int, int], owner: object
) -> HeapRows:
    """A view of received rows: `[rows, hidden]`, with their stride in the heap.

    Args:
        config: lengths of tokens and scales. Scales begin at the next 16 bytes after a token.
        device: owner of the memory.
        place: address, stride in bytes, and number of rows.
        owner: kept alive by the tensors.
    """
    base, stride, rows = place
    memory = memory_at(base, (rows, stride), device, owner)
    token = getattr(torch, config.wire_dtype)
    length = config.hidden * token.itemsize
    tokens = memory[:, :length].view(token)
    if config.scales is None:
        return HeapRows(tokens, torch.empty((0, 0), device=device))
    scale = getattr(torch, config.scales[0])
    begin = -(-length // VECTOR) * VECTOR
    scales = memory[:, begin : begin + config.scale_columns * scale.itemsize]
    return HeapRows(tokens, scales.view(scale))


def address(tensor: torch.Tensor, what: str, alignment: int = 1) -> int:
    """Address of a tensor.

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
