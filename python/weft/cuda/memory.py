"""Rows of a device's symmetric heap as tensors, and tensors of the caller as addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from weft.cuda.config import VECTOR
from weft.errors import ShapeError

if TYPE_CHECKING:
    from weft.cuda.config import Config

__all__ = ["Landed", "address", "landed", "memory_at"]


class Landed(NamedTuple):
    """Rows that arrived, where they lie: row `source * max_tokens + slot`."""

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


def memory_at(
    address: int, shape: tuple[int, int], device: torch.device, owner: object
) -> torch.Tensor:
    """So many rows of so many bytes at an address, as uint8; the tensor keeps `owner` alive."""
    given = _Bytes(address, shape, owner)
    if device.type == "cuda":
        return torch.as_tensor(given, device=device)
    return torch.from_numpy(np.asarray(given))


def landed(
    config: Config, device: torch.device, place: tuple[int, int, int], owner: object
) -> Landed:
    """A view of landed rows: `[rows, hidden]`, with the stride that they have in the heap.

    Args:
        config: how long tokens and scales are. Scales begin at the next 16 bytes after a token.
        device: whose memory it is.
        place: address, bytes from one row to the next, and rows.
        owner: kept alive by the tensors.
    """
    base, stride, rows = place
    memory = memory_at(base, (rows, stride), device, owner)
    token = getattr(torch, config.wire_dtype)
    length = config.hidden * token.itemsize
    tokens = memory[:, :length].view(token)
    if config.scales is None:
        return Landed(tokens, torch.empty((0, 0), device=device))
    scale = getattr(torch, config.scales[0])
    begin = -(-length // VECTOR) * VECTOR
    scales = memory[:, begin : begin + config.scale_columns * scale.itemsize]
    return Landed(tokens, scales.view(scale))


def address(tensor: torch.Tensor, what: str, alignment: int = 1) -> int:
    """Where a tensor lies.

    Raises:
        ShapeError: if it is not contiguous or not aligned; nothing was launched.
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
