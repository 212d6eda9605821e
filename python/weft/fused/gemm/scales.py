"""Scales for float8 GEMMs: checks, and kernel arguments for them.

The formats are E4M3 and E5M2, see https://arxiv.org/abs/2209.05433. For example, x with 4096 rows
has one scale, or 4096 row scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from weft.base.errors import ConfigurationError, ShapeError
from weft.fused.kernels.gemm.gemm import COLUMN_SCALES, FAST_SUMS, ROW_SCALES, SCALED

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FLOAT8", "OUT_DTYPES", "Scales", "checked_scales", "scaled_matmul"]

#: Operand dtypes with scales.
FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Result dtypes for float8 operands.
OUT_DTYPES: Final = (torch.bfloat16, torch.float16)
#: Required divisor for weight rows and inner size, as for `torch._scaled_mm`.
_MULTIPLE: Final = 16


class Scales(NamedTuple):
    """Checked GEMM scales.

    Attributes:
        x: float32 [result rows, 1] or one element.
        weight: float32 [1, columns] or one element.
        fast: the tensor cores sum over several steps.
    """

    x: torch.Tensor
    weight: torch.Tensor
    fast: bool

    @property
    def scaling(self) -> int:
        """Flags for the kernels, added: `weft.fused.kernels.gemm.gemm` has them."""
        scaling = SCALED
        scaling += ROW_SCALES if self.x.numel() > 1 else 0
        scaling += COLUMN_SCALES if self.weight.numel() > 1 else 0
        scaling += FAST_SUMS if self.fast else 0
        return scaling


def checked_scales(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    *,
    rows: int,
    fast: bool,
) -> Scales | None:
    """A call's scales; `None` for operands that are not float8.

    Args:
        name: operator name, for errors.
        x: [rows on this rank, inner].
        weight: [columns, inner].
        scale_x: scale argument for x.
        scale_weight: scale argument for the weight.
        out_dtype: result dtype argument.
        rows: result rows.
        fast: the call's `use_fast_accum`.

    Raises:
        ConfigurationError: if a dtype does not fit, or scales are missing or unused.
        ShapeError: if a shape or layout does not fit.
    """
    dtypes = x.dtype, weight.dtype
    if not any(dtype in FLOAT8 for dtype in dtypes):
        if scale_x is not None or scale_weight is not None:
            raise ConfigurationError(f"{name}: scales with {x.dtype}: expected operands of float8")
        if out_dtype not in (None, x.dtype):
            raise ConfigurationError(f"{name}: out_dtype {out_dtype}: expected {x.dtype}, as x")
        return None
    if not all(dtype in FLOAT8 for dtype in dtypes):
        raise ShapeError(
            f"{name}: x is {x.dtype}, weight is {weight.dtype}: expected both in float8"
        )
    if scale_x is None or scale_weight is None:
        raise ConfigurationError(f"{name}: {x.dtype} without scale_x and scale_weight: pass both")
    if out_dtype not in (None, *OUT_DTYPES):
        raise ConfigurationError(f"{name}: out_dtype {out_dtype}: expected bfloat16 or float16")
    columns, inner = weight.shape
    if columns % _MULTIPLE or inner % _MULTIPLE or not inner:
        raise ShapeError(
            f"{name}: weight {[columns, inner]} of float8: expected multiples of {_MULTIPLE}"
        )
    if not weight.is_contiguous():
        raise ShapeError(
            f"{name}: weight of float8 with strides {weight.stride()}: expected a contiguous "
            "[columns, inner]"
        )
    if x.data_ptr() % _MULTIPLE or weight.data_ptr() % _MULTIPLE:
        raise ShapeError(
            f"{name}: operands of float8 at a multiple of less than 16 bytes: expected 16"
        )
    _check_scale(name, "scale_x", scale_x, (rows, 1), x.device)
    _check_scale(name, "scale_weight", scale_weight, (1, columns), x.device)
    return Scales(scale_x, scale_weight, fast)


def _check_scale(
    name: str, of: str, scale: torch.Tensor, shape: Sequence[int], device: torch.device
) -> None:
    if tuple(scale.shape) not in ((), (1,), (1, 1), tuple(shape)):
        raise ShapeError(
            f"{name}: {of} {list(scale.shape)}: expected {list(shape)}, or one element"
        )
    if scale.dtype != torch.float32 or scale.device != device:
        raise ShapeError(
            f"{name}: {of} {scale.dtype} on {scale.device}: expected float32 on {device}"
        )
    if not scale.is_contiguous():
        raise ShapeError(
            f"{name}: {of} with strides {scale.stride()}: expected a contiguous tensor"
        )


def scaled_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """GEMM x [rows, inner] @ weight [columns, inner].T with scales, by torch.

    Args:
        x: in float8.
        weight: in float8, contiguous.
        scale_x: float32 [rows, 1] or one element.
        scale_weight: float32 [1, columns] or one element.
        dtype: result dtype.
        fast: `use_fast_accum`.
        out: [rows, columns]; by default a new tensor.
    """
    by_rows = max(scale_x.numel(), scale_weight.numel()) > 1
    if x.device.type == "cpu":
        if by_rows:
            # torch does not implement these combinations.
            made = ((x.float() @ weight.float().t()) * scale_x * scale_weight).to(dtype)
        else:
            made = torch._scaled_mm(x, weight.t(), scale_x, scale_weight, out_dtype=dtype)
        return made if out is None else out.copy_(made)
    if by_rows:
        scale_x = scale_x.expand(x.shape[0], 1).contiguous()
        scale_weight = scale_weight.expand(1, weight.shape[0]).contiguous()
    options: dict[str, Any] = {"out_dtype": dtype, "use_fast_accum": fast}
    if out is not None:
        options["out"] = out
    return torch._scaled_mm(x, weight.t(), scale_x, scale_weight, **options)
