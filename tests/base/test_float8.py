"""Quantisation by block against ml_dtypes and float64."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import weft

FORMATS = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
#: Relative error from one rounding, and absolute error below the normal range.
ERRORS = {"float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17)}
SCALES = ["float32", "float8_e8m0fnu"]


def random_values(shape: tuple[int, int], seed: int = 0) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * 2.0 ** random.integers(-20, 20, shape)
    return values.astype(np.float32)


def spread(scales: NDArray[Any], block: int, hidden: int) -> NDArray[np.float64]:
    return scales.astype(np.float64).repeat(block, axis=1)[:, :hidden]


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_code_stands_for_what_ml_dtypes_says(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).view(FORMATS[dtype])
    values = weft.float8.dequantise(codes, np.ones((1, 1), np.float32), block=256)
    np.testing.assert_array_equal(values, codes.astype(np.float32))


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_is_that_of_ml_dtypes(dtype: str) -> None:
    largest = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[dtype]
    # With the largest number in each row the scale is 1. Every float32 with 11 mantissa bits.
    values = np.arange(0, 1 << 32, 1 << 12, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = values[np.abs(values) <= largest]
    rows = np.column_stack([values, np.full_like(values, largest)])
    codes, scales = weft.float8.quantise(rows, dtype=dtype, block=2)
    assert np.all(scales == 1)
    expected = values.astype(FORMATS[dtype])
    np.testing.assert_array_equal(codes[:, 0].view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("hidden", "block"), [(256, 128), (300, 128), (33, 5), (7, 100), (4, 1)])
def test_the_error_is_within_its_bound(
    dtype: str, scale_dtype: str, hidden: int, block: int
) -> None:
    values = random_values((50, hidden))
    codes, scales = weft.float8.quantise(values, dtype=dtype, scale_dtype=scale_dtype, block=block)
    assert codes.shape == values.shape
    assert scales.shape == (50, weft.float8.scale_count(hidden, block))
    assert (codes.dtype.name, scales.dtype.name) == (dtype, scale_dtype)
    back = weft.float8.dequantise(codes, scales, block=block)
    factors = spread(scales, block, hidden)
    np.testing.assert_array_equal(back, (codes.astype(np.float64) * factors).astype(np.float32))
    relative, absolute = ERRORS[dtype]
    single = 1 + 2.0**-24
    bound = np.abs(values.astype(np.float64)) * ((1 + relative) * single - 1)
    bound += factors * absolute * single + 2.0**-150
    assert np.all(np.abs(back.astype(np.float64) - values) <= bound)


def test_scales_of_powers_of_two_are_the_least_that_fit() -> None:
    values = random_values((50, 64))
    _, scales = weft.float8.quantise(values, scale_dtype="float8_e8m0fnu", block=16)
    least = np.abs(values).reshape(50, 4, 16).max(axis=2).astype(np.float64) / 448
    np.testing.assert_array_equal(scales.astype(np.float64), 2.0 ** np.ceil(np.log2(least)))


def test_scales_may_be_bytes() -> None:
    codes, scales = weft.float8.quantise(
        random_values((3, 40)), scale_dtype="float8_e8m0fnu", block=16
    )
    values = weft.float8.dequantise(codes, scales, block=16)
    again = weft.float8.dequantise(codes, scales.view(np.uint8), block=16)
    np.testing.assert_array_equal(values, again)


def test_what_does_not_fit_is_refused() -> None:
    values = np.ones((2, 8), np.float32)
    codes, scales = weft.float8.quantise(values, block=4)
    with pytest.raises(weft.errors.ShapeError, match=r"\(2, 3\) is needed"):
        weft.float8.dequantise(codes, scales, block=3)
    with pytest.raises(weft.errors.ShapeError, match="float8_e4m3fn or float8_e5m2 is needed"):
        weft.float8.dequantise(values, scales, block=4)
    with pytest.raises(weft.errors.ShapeError, match="at least one element"):
        weft.float8.quantise(np.ones((2, 0)))
    with pytest.raises(weft.errors.ShapeError, match="at least one element"):
        weft.float8.quantise(np.ones(2))
    with pytest.raises(weft.errors.ConfigurationError, match="block is 0"):
        weft.float8.quantise(values, block=0)
    with pytest.raises(weft.errors.ConfigurationError, match="not supported"):
        weft.float8.quantise(values, dtype="float32")
    with pytest.raises(weft.errors.ConfigurationError, match="not supported"):
        weft.float8.quantise(values, scale_dtype="float16")
