"""Words in a rank's heap that only kernels use, set to values that would take days to reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.gpu.side import PLACED, memory
from weft import _native

if TYPE_CHECKING:
    from tests.gpu.case import Shape
    from tests.gpu.side import Rank, Side

#: u32 words in a channel's state with the round. The twin's count the rounds that each of the four
#: phases has ended; the kernels' word is added to the rounds that they count.
EPOCHS = {"twin": slice(0, 4), "cuda": slice(10, 11)}


def defines(shape: Shape) -> dict[str, int]:
    """Kernel macros for `shape`."""
    pairs: list[tuple[str, str]] = _native.device_defines(shape.ranks, **shape.options(), **PLACED)
    return {name: int(value.removesuffix("ull")) for name, value in pairs}


def area(side: Side, rank: Rank, channel: int, name: str, size: int) -> torch.Tensor:
    """View on an area's first bytes."""
    macros = defines(side.shape)
    # The received rows are the heap's only address visible outside.
    rows, _, _ = rank.native.received(channel)
    address = rows - macros["WEFT_ROWS_AT"] + macros[f"WEFT_{name}_AT"]
    return memory(address, (1, size), rank.device)[0]


def set_epochs(side: Side, epoch: int) -> None:
    """Set the round count on every channel on every rank, before the first round."""
    side.synchronise()
    signed = epoch - (1 << 32) if epoch >= 1 << 31 else epoch
    for rank in side.ranks:
        for channel in range(side.shape.channels):
            words = area(side, rank, channel, "STATE", 64).view(torch.int32)
            words[EPOCHS[side.kind]] = signed
    side.synchronise()


def announce(side: Side, rank: Rank, source: int, epoch: int) -> None:
    """Write a source's counts for one row, for the first expert here."""
    line = side.shape.local_experts + 1
    counts = area(side, rank, 0, "COUNTS", 8 * line * side.shape.ranks).view(torch.int64)
    counts = counts.view(side.shape.ranks, line)
    # int64 whose upper half is the epoch.
    counts[source] = (epoch - (1 << 32) if epoch >= 1 << 31 else epoch) << 32
    counts[source, 0] += 1
    counts[source, -1] += 1
    side.synchronise()
