"""Products by torch beside collectives of `weft.cuda.Collectives`: the unfused way of a call.

Results are as those of the fused kernels, but for rounding: the product of a rank is rounded to the
dtype of the result before a sum, and of float32 it is as torch's settings have it. Tensors that
peers access are in a symmetric space of these calls where that is faster, with a copy to the result
if needed. Calls on several streams come in one order with those of the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from weft.cuda.collectives import Collectives
from weft.errors import ConfigurationError
from weft.fused import spaces
from weft.fused.kernels.gemm_send import ALL_REDUCE, REDUCE_SCATTER
from weft.fused.scales import scaled_product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.communicator import Communicator
    from weft.fused.gemm import Operands

__all__ = ["receive", "send"]

#: Bytes from which a collective on symmetric memory and a copy are faster than one on ordinary
#: memory: of an all-reduce those to all peers, from which calls are direct; of an all-to-all those
#: of its tensor. By measurements of two H100 in docs/gpu-collectives.md; the copy is estimated.
_STAGED_REDUCTION: Final = 640 << 10
_STAGED_EXCHANGE: Final = 4 << 20
_ALIGNED: Final = 128


def send(
    given: Operands, operation: int, result: torch.Tensor, is_symmetric: bool, group: Communicator
) -> torch.Tensor:
    """Product, then the collective of an operation of `multiply_send`.

    Args:
        given: operands.
        operation: `ALL_TO_ALL`, `REDUCE_SCATTER` or `ALL_REDUCE`.
        result: [rows, columns], or those of this rank after a reduce-scatter.
        is_symmetric: `result` is in symmetric memory, at the same place on all ranks.
        group: of the ranks.

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
        collectives, (product,) = _begin(given, group, [shape], given.dtype)
        _multiply(given, x, product)
        return collectives.reduce_scatter(product, out=result)
    if operation == ALL_REDUCE:
        if size * (ranks - 1) <= _STAGED_REDUCTION:
            collectives, _ = _begin(given, group, [], given.dtype)
            return collectives.all_reduce(_multiply(given, x, result))
        # Not in place, so that the results of a failed call are NaN.
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
    """All-gather or, with `scatter`, all-to-all of the rows of x, then the product.

    Args:
        given: operands.
        scatter: each rank receives a block of rows of each x, not all of them.
        result: rows that this rank receives, by columns.
        group: of the ranks.

    Returns:
        `result`, and the received rows, in memory that the next call uses again.
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
    """Product of rows and the weight, without a derivative."""
    weight = given.weight.detach()
    if out is None:
        # Autocast would choose another dtype for the result.
        out = rows.new_empty((rows.shape[0], given.columns), dtype=given.dtype)
    if given.scales is None:
        return torch.mm(rows, weight.t(), out=out)
    scales = given.scales
    factors = scales.x.detach(), scales.weight.detach()
    return scaled_product(rows, weight, *factors, given.dtype, scales.fast, out=out)


def _placed(found: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return result if found is result else result.copy_(found)


def _begin(
    given: Operands, group: Communicator, shapes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[Collectives, list[torch.Tensor]]:
    """Collectives of the ranks, and symmetric tensors of these shapes; a call begins."""
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
    """The collectives of a communicator on a device, made by the first call that needs them."""
    device = given.x.device
    found = group._collectives.get(device)
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
