"""Standalone RMS-norm kernel, without peers."""

import triton
import triton.language as tl

__all__ = ["norm_kernel"]


@triton.jit(do_not_specialize=["hidden_by_8"])
def norm_kernel(x, norm_weight, output, hidden_by_8, eps, block: tl.constexpr):
    """A program for each row, which it keeps in registers; rounding as in `gemv_kernel`.

    Args:
        x: [rows, hidden].
        norm_weight: [hidden].
        output: [rows, hidden]: the normed rows.
        hidden_by_8: elements in a row, divided by 8.
        eps: added to the mean square.
        block: a power of 2, at least a row's elements.
    """
    hidden = hidden_by_8 * 8
    begin = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, block)
    inside = at < hidden
    # In flight together.
    values = tl.load(x + begin + at, inside, 0.0).to(tl.float32)
    weights = tl.load(norm_weight + at, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / hidden + eps)
    scaled = (values * scale).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + begin + at, (scaled * weights).to(output.dtype.element_ty), inside)
