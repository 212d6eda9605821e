"""Unfused GEMMs: torch's GEMM beside a collective from `weft.cuda.Collectives`.

Results equal the fused kernels' results, except for rounding: each rank's partial result is rounded
to the result's dtype before a sum, and in float32 it follows torch's settings. Tensors that peers
access are in a symmetric space for these calls where that is faster, with a copy to the result if
needed. Calls on several streams are serialized with the kernels' calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch

from weft.base.errors import ConfigurationError
from weft.collectives.device.collectives import Collectives
from weft.fused import spaces
from weft.fused.gemm.scales import scaled_matmul
from weft.fused.kernels.gemm.send import ALL_REDUCE, REDUCE_SCATTER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.fused.gemm.gemm import Operands
    from weft.group.communicator import Communicator

__all__ = ["receive", "send"]

#: Size in bytes from which a collective on symmetric memory plus a copy is faster than one on
#: ordinary memory. An all-reduce counts the bytes to all peers, from which calls are direct; an
#: all-to-all counts the tensor. Measured on two H100 (docs/results/gpu-collectives.md); the copy is
#: estimated.
_STAGED_REDUCTION: Final = 640 << 10
_STAGED_EXCHANGE: Final = 4 << 20
_ALIGNED: Final = 128


def send(
    given: Operands, operation: int, result: torch.Tensor, is_symmetric: bool, group: Communicator
) -> torch.Tensor:
    """GEMM, then the collective for a `multiply_send` operation.

    Args:
        given: operands.
        operation: `ALL_TO_ALL`, `REDUCE_SCATTER` or `ALL_REDUCE`.
        result: [rows, columns], or only this rank's rows after a reduce-scatter.
        is_symmetric: `result` is in symmetric memory, at the same place on all ranks.
        group: this call's communicator.

    Returns:
        `result`.
    """
    x, ranks = given.x.detach(), group.world_size
    if given.inner == 0:
        return result.zero_()
    if ranks == 1:
        return _multiply(given, x, result)
    shape = given.rows, given.columns
    size = given.rows * given.columns * given.dtype.itemsize
    if operation == REDUCE_SCATTER:
        collectives, (matmul,) = _begin(given, group, [shape], given.dtype)
        _multiply(given, x, matmul)
        return collectives.reduce_scatter(matmul, out=result)
    if operation == ALL_REDUCE:
        if size * (ranks - 1) <= _STAGED_REDUCTION:
            collectives, _ = _begin(given, group, [], given.dtype)
            return collectives.all_reduce(_multiply(given, x, result))
        # Not in place, so that a failed call leaves NaN in the results.
        shapes = [shape] if is_symmetric else [shape, shape]
        collectives, staged = _begin(given, group, shapes, given.dtype)
        _multiply(given, x, staged[0])
        into = result if is_symmetric else staged[1]
        return _placed(collectives.all_reduce(staged[0], out=into), result)
    is_staged = not is_symmetric and size >= _STAGED_EXCHANGE
    collectives, staged = _begin(given, group, [shape] if is_staged else [], given.dtype)
    into = staged[0] if is_staged else result
    return _placed(collectives.all_to_all(_multiply(given, x), out=into), result)


def receive(
    given: Operands, scatter: bool, result: torch.Tensor, group: Communicator
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather or, with `scatter`, all-to-all with x's rows, then the GEMM.

    Args:
        given: operands.
        scatter: each rank receives one row block from each x, not all rows.
        result: rows that this rank receives, by columns.
        group: this call's communicator.

    Returns:
        `result`, and the received rows, in memory that the next call reuses.
    """
    x = given.x.detach()
    if given.inner == 0:
        return result.zero_(), x.new_empty(result.shape[0], 0)
    if group.world_size == 1:
        return _multiply(given, x, result), x
    collectives, (rows,) = _begin(given, group, [(result.shape[0], given.inner)], x.dtype)
    exchange = collectives.all_to_all if scatter else collectives.all_gather
    exchange(x, out=rows)
    return _multiply(given, rows, result), rows


def _multiply(given: Operands, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows times weight, without a derivative."""
    weight = given.weight.detach()
    if out is None:
        # Autocast would choose another dtype for the result.
        out = rows.new_empty((rows.shape[0], given.columns), dtype=given.dtype)
    if given.scales is None:
        return torch.mm(rows, weight.t(), out=out)
    scales = given.scales
    factors = scales.x.detach(), scales.weight.detach()
    return scaled_matmul(rows, weight, *factors, given.dtype, scales.fast, out=out)


def _placed(found: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return result if found is result else result.copy_(found)


def _begin(
    given: Operands, group: Communicator, shapes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[Collectives, list[torch.Tensor]]:
    """The group's collectives, and symmetric tensors with these shapes; a call begins."""
    width, device = dtype.itemsize, given.x.device
    sizes = [-(-rows * columns * width // _ALIGNED) * _ALIGNED for rows, columns in shapes]
    its = spaces.space("composed", device, group, words=1, data=max(sum(sizes), _ALIGNED))
    its.enter()
    tensors, begin = list[torch.Tensor](), 0
    for (rows, columns), size in zip(shapes, sizes, strict=True):
        part = its.data[begin : begin + rows * columns * width]
        tensors.append(part.view(dtype).view(rows, columns))
        begin += size
    return _collectives(given, group), tensors


def _collectives(given: Operands, group: Communicator) -> Collectives:
    """A communicator's collectives on a device, made by the first call that needs them."""
    device = given.x.device
    found = cast("Collectives | None", group._collectives.get(device))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                f"weft.fused.{given.operator}: collectives have to be made, which a capture does "
                "not allow; make the same call once before the capture"
            )
        name: object = "twin" if given.interpreted else device
        found = Collectives(group, device=name, skew_timeout=spaces.timeout())
        group._collectives[device] = found
    return found
