"""Torch tensor reductions on the CPU by their definition, bit by bit, in numpy.

Contributions are folded in rank order. Sums, products and averages in 8- and 16-bit floats
bits are kept in float32 and rounded once, behind the division. A computed NaN is positive and
quiet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
#: Computed NaN bits.
FLOAT8_NAN = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}
INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
OPS = ("sum", "product", "min", "max", "avg")
BITWISE = ("and", "or", "xor")


def to_bytes(tensor: torch.Tensor) -> Array:
    """A dense tensor's bytes."""
    # A tensor without elements may have any stride, and then no view.
    rows = tensor.detach().cpu().reshape(-1)
    empty = torch.empty(0, dtype=torch.uint8)
    made: Array = (rows.view(torch.uint8) if len(rows) else empty).numpy()
    return made


def reduce(op: str, dtype: str, contributions: list[Array]) -> Array:
    """Reduction result as bytes, for vectors of a dtype given as bytes."""
    if len(contributions) == 1:
        return contributions[0].copy()
    with np.errstate(all="ignore"):
        values = [widen(each, dtype) for each in contributions]
        result = values[0]
        for value in values[1:]:
            result = fold(op, dtype, result, value)
        if op == "avg":
            if dtype not in FLOATS:
                result = widen(narrow(result, dtype), dtype)
            result = divide(dtype, result, len(values))
        return narrow(result, dtype)


def fold(op: str, dtype: str, a: Array, b: Array) -> Array:
    """One reduction step."""
    if dtype == "bool":
        op = {"sum": "or", "avg": "or", "max": "or", "product": "and", "min": "and"}.get(op, op)
    if op in ("min", "max"):
        return extreme(op, a, b)
    step: Any = {"sum": np.add, "avg": np.add, "product": np.multiply}.get(op)
    step = step or {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
    result: Array = step(a, b)
    return result


def extreme(op: str, a: Array, b: Array) -> Array:
    """Minimum or maximum: NaN if either is, and -0 below +0."""
    if a.dtype.kind != "f":
        chosen: Array = np.minimum(a, b) if op == "min" else np.maximum(a, b)
        return chosen
    below = (a < b) | ((a == b) & np.signbit(a))
    chosen = np.where(below, a, b) if op == "min" else np.where(below, b, a)
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), chosen)


def divide(dtype: str, values: Array, ranks: int) -> Array:
    """Quotients: of floats rounded, of integers truncated."""
    divisor = values.dtype.type(ranks)
    if dtype in FLOATS:
        quotient: Array = values / divisor
        return quotient
    floor: Array = values // divisor
    up: Array = (values < 0) & (values % divisor != 0)
    quotients: Array = np.add(floor, up.astype(floor.dtype))
    return quotients


def widen(stored: Array, dtype: str) -> Array:
    """Values in the arithmetic dtype."""
    values: Array
    if dtype == "bool":
        values = (stored != 0).astype(np.uint8)
    elif dtype == "bfloat16":
        values = (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float16":
        values = stored.view(np.float16).astype(np.float32)
    elif dtype in FLOAT8_NAN:
        codes = torch.from_numpy(stored).view(getattr(torch, dtype))
        values = codes.float().numpy()
    else:
        values = stored.view(dtype)
    return values


def narrow(values: Array, dtype: str) -> Array:
    """Value bytes, rounded to nearest, ties to even."""
    stored: Array
    if dtype == "bool":
        stored = (values != 0).astype(np.uint8)
    elif dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        stored = np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    elif dtype == "float16":
        bits = values.astype(np.float16).view(np.uint16)
        stored = np.where(np.isnan(values), 0x7E00, bits).astype(np.uint16)
    elif dtype in FLOAT8_NAN:
        rounded = torch.from_numpy(values).to(getattr(torch, dtype))
        # Beyond the largest float8_e4m3fn number, too.
        is_nan = rounded.float().isnan().numpy()
        stored = np.where(is_nan, FLOAT8_NAN[dtype], rounded.view(torch.uint8).numpy())
        stored = stored.astype(np.uint8)
    elif dtype in FLOATS:
        stored = np.where(np.isnan(values), values.dtype.type(np.nan), values).astype(values.dtype)
    else:
        stored = values
    result: Array = np.ascontiguousarray(stored).view(np.uint8)
    return result


def drawn(random: np.random.Generator, dtype: torch.dtype, count: int) -> Array:
    """`count` random elements as bytes: numbers, or any bits, special ones among them."""
    name, width = str(dtype).removeprefix("torch."), dtype.itemsize
    any_bits = np.frombuffer(random.bytes(count * width), np.uint8).copy()
    if name == "bool":
        return any_bits & 3
    if name not in FLOATS or random.random() < 0.4:
        return any_bits
    scale = random.choice([1e-3, 1.0, 300.0])
    numbers = random.standard_normal(count) * scale
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0])
    at = random.random(count) < 0.2
    numbers[at] = special[random.integers(0, 6, count)][at]
    return to_bytes(torch.from_numpy(numbers).to(dtype))
