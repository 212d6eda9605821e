"""8-bit floats in blocks along the last dimension, each block with a scale.

An element's value is the code's number times the block's scale::

    codes, scales = weft.float8.quantise(values, block=128)
    values = weft.float8.dequantise(codes, scales, block=128)

With `block=32` and float8_e8m0fnu scales the format is MXFP8, as in OCP's specification:
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from weft import _native
from weft.base.arguments import expect_number, shown
from weft.base.array import FLOAT8, SCALES, Array, array, dtype_name
from weft.base.errors import ConfigurationError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["dequantise", "quantise", "scale_count"]


def scale_count(hidden: int, block: int) -> int:
    """Scales for `hidden` elements; the last block may be shorter than the others."""
    if expect_number(block, "block") < 1:
        raise ConfigurationError(f"block is {shown(block)}; it must be at least 1")
    return -(-expect_number(hidden, "hidden") // block)


def quantise(
    values: ArrayLike,
    *,
    dtype: object = "float8_e4m3fn",
    block: int = 128,
    scale_dtype: object = "float32",
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Choose a scale for each block and round each element over it to the nearest code.

    A scale is the block's largest finite magnitude over the largest `dtype` number; in
    float8_e8m0fnu, the smallest power of two that is not less. A block with only zeros has scale 1.
    NaN stays NaN; an infinity stays one in float8_e5m2 and becomes NaN in float8_e4m3fn.
    `docs/moe.md` has the error bound.

    Args:
        values: `[rows, hidden]`, taken as float32.
        dtype: code dtype: float8_e4m3fn or float8_e5m2.
        block: elements that share a scale; `hidden` need not be a multiple of it.
        scale_dtype: float32 or float8_e8m0fnu.

    Returns:
        Codes, `[rows, hidden]` in `dtype`, and scales, `[rows, ceil(hidden / block)]`.

    Raises:
        ShapeError: if `values` is not two-dimensional, or has no columns.
        ConfigurationError: if a dtype or `block` has no meaning here.
    """
    try:
        # Infinities for numbers beyond float32 are wanted.
        with np.errstate(over="ignore"):
            given = np.asarray(values, dtype=np.float32, order="C")
    except (TypeError, ValueError, OverflowError) as error:
        raise ShapeError(
            f"values {shown(values)}: expected numbers of float32, [rows, hidden]: {error}"
        ) from error
    name = dtype_name(dtype, FLOAT8)
    scale_name = dtype_name(scale_dtype, SCALES, "scale_dtype")
    rows, hidden = _extent(given.shape, block, "values")
    codes = np.empty((rows, hidden), dtype=FLOAT8[name])
    scales = np.empty((rows, scale_count(hidden, block)), dtype=SCALES[scale_name])
    _native.quantise(
        array(given, "values").native(),
        hidden,
        name,
        scale_name,
        block,
        array(codes, "codes").native(),
        array(scales, "scales").native(),
    )
    return codes, scales


def dequantise(codes: object, scales: object, *, block: int = 128) -> NDArray[np.float32]:
    """Each code's number times the block's scale, rounded to float32.

    Args:
        codes: `[rows, hidden]` in float8_e4m3fn or float8_e5m2.
        scales: `[rows, ceil(hidden / block)]` in float32 or float8_e8m0fnu (or uint8 bytes).
        block: elements that share a scale.

    Raises:
        ShapeError: if the array shapes do not match.
        ConfigurationError: if `block` is not at least 1.
    """
    given = array(codes, "codes")
    rows, hidden = _extent(given.shape, block, "codes")
    if given.dtype not in FLOAT8:
        raise ShapeError(f"codes is of dtype {given.dtype}; {' or '.join(FLOAT8)} is needed")
    factors = scale_array(scales, (rows, scale_count(hidden, block)))
    values = np.empty((rows, hidden), dtype=np.float32)
    _native.dequantise(
        given.native(),
        factors.native(),
        hidden,
        given.dtype,
        factors.dtype,
        block,
        array(values, "values").native(),
    )
    return values


def scale_array(scales: object, shape: tuple[int, int], dtype: str | None = None) -> Array:
    """The array `scales`, checked for this shape and for this dtype or any scale dtype.

    Raises:
        ShapeError: if it is not.
    """
    given = array(scales, "scales")
    if given.dtype == "uint8":
        given = given._replace(dtype="float8_e8m0fnu")
    if given.shape != shape:
        raise ShapeError(f"scales has shape {given.shape}; {shape} is needed")
    allowed = SCALES if dtype is None else (dtype,)
    if given.dtype not in allowed:
        raise ShapeError(f"scales is of dtype {given.dtype}; {' or '.join(allowed)} is needed")
    return given


def _extent(shape: tuple[int, ...], block: int, what: str) -> tuple[int, int]:
    if expect_number(block, "block") < 1:
        raise ConfigurationError(f"block is {shown(block)}; it must be at least 1")
    if len(shape) != 2 or shape[1] == 0:
        raise ShapeError(f"{what} has shape {shape}; rows of at least one element are needed")
    return shape[0], shape[1]
