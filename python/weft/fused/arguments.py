"""Operators that exchange packets: argument checks, spaces, launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton

from weft.base.errors import ConfigurationError, ShapeError
from weft.fused import spaces
from weft.fused.kernels.packets import MAX_PROGRAMS
from weft.fused.kernels.rms_norm import MAX_ROWS
from weft.gpu import symmetric

if TYPE_CHECKING:
    from weft.fused.spaces import Space
    from weft.group.communicator import Communicator

__all__ = [
    "DTYPES",
    "check_input",
    "check_tensor",
    "flag_space",
    "group_of",
    "half_by_16",
    "is_two_shot",
    "packet_space",
    "world_size",
]

#: Input and output dtypes.
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
#: Bytes that a rank sends to all peers during one more exchange: 2 us at 360 GB/s.
_EXCHANGE_BYTES: Final = 720_000
_PACKET: Final = 8
#: An inbox half holds a multiple of this many packets.
_UNIT: Final = 16


def check_input(operator: str, name: str, tensor: torch.Tensor, columns: str) -> None:
    """Check a tensor [tokens, columns], by which the others are judged."""
    if tensor.dim() != 2:
        shape = list(tensor.shape)
        raise ShapeError(f"{operator}: {name} {shape}: expected [tokens, {columns}]")
    if tensor.dtype not in DTYPES:
        raise ShapeError(
            f"{operator}: {name} {tensor.dtype}: expected bfloat16, float16 or float32"
        )
    size = tensor.shape[1]
    if size % 8 or not size:
        raise ShapeError(f"{operator}: {columns} {size}: expected a multiple of 8")
    _check_layout(operator, name, tensor)
    _check_device(operator, name, tensor)


def check_tensor(
    operator: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor
) -> None:
    """Check a contiguous tensor of a shape, with the dtype and device of another."""
    if tuple(tensor.shape) != shape:
        found, expected = list(tensor.shape), list(shape)
        raise ShapeError(f"{operator}: {name} {found}: expected {expected}")
    if tensor.dtype != like.dtype:
        raise ShapeError(f"{operator}: {name} {tensor.dtype}: expected {like.dtype}, as x")
    if tensor.device != like.device:
        raise ConfigurationError(
            f"{operator}: {name} on {tensor.device}: expected {like.device}, as x"
        )
    _check_layout(operator, name, tensor)


def _check_layout(operator: str, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{operator}: {name} with strides {tensor.stride()}: expected a contiguous tensor"
        )
    if tensor.data_ptr() % 16:
        raise ShapeError(f"{operator}: {name} at a multiple of less than 16 bytes: expected 16")


def _check_device(operator: str, name: str, tensor: torch.Tensor) -> None:
    interpreted = triton.knobs.runtime.interpret
    if tensor.device.type == "cuda" and not interpreted:
        return
    if tensor.device.type != "cpu":
        raise ConfigurationError(
            f"{operator}: {name} on {tensor.device}: expected a GPU"
            + (", without TRITON_INTERPRET" if interpreted else "")
        )
    if not interpreted:
        raise ConfigurationError(
            f"{operator}: {name} on the CPU: expected a GPU, or Triton's interpreter; set "
            "TRITON_INTERPRET=1 before triton is imported"
        )
    if tensor.dtype == torch.bfloat16:
        raise ConfigurationError(
            f"{operator}: {name} torch.bfloat16 under Triton's interpreter, which does not compute "
            "it correctly: expected float16 or float32"
        )


def is_two_shot(
    operator: str, algorithm: str | None, packets: int, communicator: Communicator | None
) -> bool:
    """True if sums go through their owner: by `algorithm`, or if that is faster.

    `packets`: packets in one rank's part.
    """
    if algorithm not in (None, "one_shot", "two_shot"):
        raise ConfigurationError(
            f"{operator}: algorithm {algorithm!r}: expected 'one_shot', 'two_shot' or None"
        )
    if algorithm is not None:
        return algorithm == "two_shot"
    ranks = world_size(communicator)
    # One shot sends ranks - 1 parts, two shots 2 (ranks - 1) / ranks.
    saved = packets * _PACKET * (ranks - 1) * (ranks - 2) // ranks
    return saved > _EXCHANGE_BYTES


def packet_space(
    operator: str,
    device: torch.device,
    communicator: Communicator | None,
    packets: int,
    squares: int = 0,
) -> Space:
    """The space for an operator whose ranks send `packets` each, entered for a call.

    Args:
        operator: name.
        device: device with the call's tensors.
        communicator: group that shares the space; by default the only one that is open.
        packets: packets in one rank's part.
        squares: packets in this device's memory, after the programs' words.
    """
    ranks = world_size(communicator)
    half = -(-(ranks + 1) * packets // _UNIT) * _UNIT
    found = spaces.space(
        operator,
        device,
        communicator,
        words=1,
        data=2 * half * _PACKET,
        state=MAX_PROGRAMS + 2 * squares,
    )
    found.enter()
    return found


def flag_space(
    operator: str, device: torch.device, communicator: Communicator | None, rows: int, words: int
) -> Space:
    """The space for an operator whose ranks send rows and flags, entered for a call.

    These inboxes have plain data, so packets have separate ones.

    Args:
        operator: name.
        device: device with the call's tensors.
        communicator: group that shares the space; by default the only one that is open.
        rows: number of rows.
        words: 32-bit words in a row.
    """
    ranks = world_size(communicator)
    half = -(-(ranks + 1) * rows * words // _UNIT) * _UNIT
    found = spaces.space(
        operator,
        device,
        communicator,
        words=(ranks + 1) * MAX_ROWS,
        data=2 * half * 4,
        state=MAX_PROGRAMS,
    )
    found.enter()
    return found


def world_size(communicator: Communicator | None) -> int:
    """A communicator's size, by default the only open one's."""
    group = symmetric.only_open() if communicator is None else communicator
    return int(group.world_size)


def half_by_16(space: Space) -> int:
    """Packets in an inbox half, divided by 16."""
    packets: int = space.data.numel() // _PACKET
    return packets // (2 * _UNIT)


def group_of(block: int, num_warps: int, ranks: int) -> int:
    """Ranks whose packets are loaded together, as a thread's registers allow.

    Args:
        block: a rank's packets in a program's block.
        num_warps: warps in a program.
        ranks: number of ranks.
    """
    each = max(1, block // (32 * num_warps))
    # With more than 4 ranks, the inbox addresses take registers too.
    most = 32 if ranks <= 4 else 24
    return max(1, min(ranks, most // each))
