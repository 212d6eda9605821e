"""Expert ids and router weights: checks, and conversion for the native module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from weft.base.array import is_torch, refuse_foreign_order, refuse_gradient
from weft.base.errors import ExpertError, RegionError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["expert_ids", "router_weights"]

_LARGEST: Final = np.iinfo(np.int64).max


def expert_ids(ids: object, shape: tuple[int, int]) -> NDArray[np.int64]:
    """`ids` as contiguous int64 in this shape, with unchanged numbers.

    Raises:
        ShapeError: if the shape differs, or the dtype is no integer dtype.
        ExpertError: if a number does not fit int64.
    """
    given = _numpy(ids, "ids")
    if given.dtype.kind not in "iu":
        raise ShapeError(
            f"ids is of dtype {given.dtype}: an integer dtype is needed; pass ids of int64"
        )
    if given.shape != shape:
        raise ShapeError(f"ids has shape {given.shape}; {shape} is needed (tokens, top_k)")
    if given.dtype == np.uint64 and given.size and given.max() > _LARGEST:
        token, slot = np.argwhere(given > _LARGEST)[0].tolist()
        raise ExpertError(
            f"ids[{token}, {slot}] is {given[token, slot]}: at most {_LARGEST} is possible; "
            "pass -1 for no expert"
        )
    return np.ascontiguousarray(given, dtype=np.int64)


def router_weights(weights: object, shape: tuple[int, int]) -> NDArray[np.float32]:
    """`weights` as contiguous float32 in this shape, rounded to float32.

    Raises:
        ShapeError: if the shape differs, or the dtype has no real numbers.
        ConfigurationError: if it requires a gradient.
    """
    refuse_gradient(weights, "weights")
    given = _numpy(weights, "weights")
    if given.dtype.kind not in "fiu" and given.dtype.name != "bfloat16":
        raise ShapeError(
            f"weights is of dtype {given.dtype}: real numbers are needed; pass weights of float32"
        )
    if given.shape != shape:
        raise ShapeError(f"weights has shape {given.shape}; {shape} is needed")
    return np.ascontiguousarray(given, dtype=np.float32)


def _numpy(value: Any, what: str) -> NDArray[Any]:
    """`value` as a numpy array, with the same dtype.

    Raises:
        ShapeError: if it is no array, or not in native byte order.
        RegionError: if it is not in CPU memory.
    """
    if is_torch(value):
        if value.device.type != "cpu":
            raise RegionError(f"{what} is not in CPU memory: copy it there first")
        value = value.detach()
    try:
        given = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"{what} cannot be taken as an array: {error}") from error
    refuse_foreign_order(given.dtype, what)
    return given
