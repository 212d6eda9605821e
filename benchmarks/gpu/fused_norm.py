"""Residual and RMS norm in one kernel, as serving engines have it, behind an all-reduce."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["add_and_norm"]


@triton.jit
def _add_and_norm(given, residual, weight, out, total, hidden, epsilon, size: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, size)
    inside = at < hidden
    added = tl.load(residual + begin + at, inside, 0.0).to(tl.float32)
    added += tl.load(given + begin + at, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(added * added, 0) / hidden + epsilon)
    scaled = added * scale * tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(total + begin + at, added.to(total.dtype.element_ty), inside)
    tl.store(out + begin + at, scaled.to(out.dtype.element_ty), inside)


def add_and_norm(given: Any, residual: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    """RMS norm over `residual + given` times `weight`, and the sum.

    Args:
        given, residual: [tokens, hidden], contiguous.
        weight: [hidden].
        epsilon: added to the mean square.
    """
    out, total = torch.empty_like(given), torch.empty_like(given)
    tokens, hidden = given.shape
    block = triton.next_power_of_2(hidden)
    _add_and_norm[(tokens,)](
        given, residual, weight, out, total, hidden, epsilon, size=block, num_warps=8
    )
    return out, total
