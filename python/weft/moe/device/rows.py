"""Received all-to-all rows in the symmetric heap, as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.gpu.memory import memory_at
from weft.moe.device.config import VECTOR

if TYPE_CHECKING:
    from weft.moe.device.config import Config

__all__ = ["HeapRows", "heap_rows"]


class HeapRows(NamedTuple):
    """Received rows in the heap: row `source * max_tokens + slot`."""

    tokens: torch.Tensor
    #: Empty if tokens have none.
    scales: torch.Tensor


def heap_rows(
    config: Config, device: torch.device, place: tuple[int, int, int], owner: object
) -> HeapRows:
    """View on received rows: `[rows, hidden]`, with the heap stride.

    Args:
        config: token and scale lengths. Scales begin at the next 16 bytes after a token.
        device: owner of the memory.
        place: address, stride in bytes, and row count.
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
