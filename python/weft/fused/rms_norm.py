"""Sum of rows over the ranks, with a residual and RMS norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton.language as tl
from triton import next_power_of_2

from weft.errors import ShapeError
from weft.fused import arguments
from weft.fused.kernels.rms_norm import norm_kernel
from weft.fused.spaces import programs_of

if TYPE_CHECKING:
    from weft.communicator import Communicator

__all__ = ["all_reduce_rms_norm"]

_OPERATOR: Final = "all_reduce_rms_norm"
_KERNEL_DTYPES: Final = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
#: Words of a row at most: a program has them in registers.
_MAX_WORDS: Final = 16384
#: Rows of a call at most.
_MAX_ROWS: Final = 1024


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor | None = None,
    communicator: Communicator | None = None,
    algorithm: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of x over the ranks, plus a residual; the RMS norm of that, and it itself.

    The sum y is in float32, in rank order, rounded to the dtype of x; r = y + residual is rounded
    again. Normed rows are `round(round(r * rsqrt(mean(r * r) + eps)) * norm_weight)`, with the mean
    and both products in float32, as Llama's RMS norm. All ranks get the same bits.

    Args:
        x: [rows, hidden], contiguous: partial sums of this rank; bfloat16, float16 or float32.
            0 to 1024 rows, meant for up to 512. `hidden` is a multiple of 8 and at most 32768, of
            float32 at most 16384.
        residual: [rows, hidden], dtype of x, equal on all ranks.
        norm_weight: [hidden], dtype of x, equal on all ranks.
        eps: added to the mean of squares.
        out: [rows, hidden], dtype of x: the normed rows. It may be x.
        communicator: that of the ranks; by default the only one that is open.
        algorithm: "one_shot" (rows to all ranks), "two_shot" (to an owner, which sends the sum to
            all), or None: the faster one by size.

    Returns:
        Normed rows, and the rows before; both [rows, hidden], dtype of x.

    Raises:
        ShapeError, ConfigurationError: an argument is invalid.
        WaitTimeoutError, GroupPoisonedError: recorded by earlier calls.
    """
    arguments.check_input(_OPERATOR, "x", x, "hidden")
    rows, hidden = x.shape
    words = hidden * x.itemsize // 4
    if words > _MAX_WORDS:
        most = _MAX_WORDS * 4 // x.itemsize
        raise ShapeError(f"{_OPERATOR}: hidden {hidden}: expected at most {most} of {x.dtype}")
    if rows > _MAX_ROWS:
        raise ShapeError(f"{_OPERATOR}: {rows} rows: expected at most {_MAX_ROWS}")
    arguments.check_tensor(_OPERATOR, "residual", residual, (rows, hidden), x)
    arguments.check_tensor(_OPERATOR, "norm_weight", norm_weight, (hidden,), x)
    output = torch.empty_like(x) if out is None else out
    arguments.check_tensor(_OPERATOR, "out", output, (rows, hidden), x)
    summed = torch.empty_like(x)
    two_shot = arguments.is_two_shot(_OPERATOR, algorithm, rows * words, communicator)
    if not rows:
        return output, summed
    space = arguments.packet_space(_OPERATOR, x.device, communicator, rows * words)
    # 8 words for each thread, of 4 to 16 warps.
    num_warps = max(4, min(16, next_power_of_2(words) // 256))
    block = max(next_power_of_2(words), 32 * num_warps)
    arguments.launch(
        norm_kernel,
        min(rows, programs_of(x.device)),
        x.device,
        *(_words(tensor) for tensor in (x, residual, norm_weight, output, summed)),
        *(space.data.view(torch.int64), space.state, space.context),
        *(rows, words // 4, arguments.half_by_16(space), eps),
        dtype=_KERNEL_DTYPES[x.dtype],
        two_shot=two_shot,
        ranks=space.ranks,
        group=arguments.group_of(block, num_warps, space.ranks),
        block=block,
        num_warps=num_warps,
    )
    return output, summed


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of 16 bits as int32 words of two elements."""
    return tensor if tensor.dtype == torch.float32 else tensor.view(torch.int32)
